/* Whether allocations fail on purpose. See memory.h. */
#include "base/memory.h"

bool (*dr_memory_fails)(void);
