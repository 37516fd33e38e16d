/* Whether allocations fail on purpose. See memory.h. */
#include "memory.h"

bool (*dr_memory_fails)(void);
