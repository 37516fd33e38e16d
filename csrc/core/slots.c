/* How far work is, in memory that processes may share. See slots.h. */
#include "slots.h"

#include "sys.h"

#include <unistd.h>

void dr_slots_wake(struct dr_slots *slots) {
    atomic_fetch_add(&slots->changes, 1);
    dr_sys.wake_all(&slots->changes);
}

void dr_slots_wait(struct dr_slots *slots, uint32_t changes, int timeout_ms) {
    dr_sys.wait_for(&slots->changes, changes, timeout_ms);
}

void dr_slots_join(struct dr_slots *slots, size_t index) {
    struct dr_slot *slot = &slots->slot[index];
    atomic_store(&slot->done, 0);
    atomic_store(&slot->total, 0);
    atomic_store(&slot->process, (uint32_t)getpid());
    atomic_store(&slot->state, DR_SLOT_JOINED);
    dr_slots_wake(slots);
}

void dr_slots_begin(struct dr_slots *slots, size_t index, uint64_t total) {
    struct dr_slot *slot = &slots->slot[index];
    atomic_store(&slot->total, total);
    atomic_store(&slot->state, DR_SLOT_RUNNING);
    dr_slots_wake(slots);
}

void dr_slots_end(struct dr_slots *slots, size_t index, bool failed) {
    struct dr_slot *slot = &slots->slot[index];
    if (!failed)
        atomic_store(&slot->done, atomic_load(&slot->total));
    atomic_store(&slot->state, failed ? DR_SLOT_FAILED : DR_SLOT_DONE);
    dr_slots_wake(slots);
}

static uint64_t add(uint64_t a, uint64_t b) { return a + b < a ? UINT64_MAX : a + b; }

struct dr_sums dr_slots_sum(struct dr_slots *slots, size_t count) {
    struct dr_sums sums = {0};
    for (size_t i = 0; i < count; i++) {
        struct dr_slot *slot = &slots->slot[i];
        uint32_t state = atomic_load(&slot->state);
        if (state == DR_SLOT_FREE)
            continue;
        uint64_t total = atomic_load(&slot->total), done = atomic_load(&slot->done);
        sums.total = add(sums.total, total);
        sums.done = add(sums.done, done < total ? done : total);
        bool over = state == DR_SLOT_DONE || state == DR_SLOT_FAILED;
        bool lost = !over && dr_sys.process_exists((int)atomic_load(&slot->process)) == 0;
        sums.joined += state == DR_SLOT_JOINED && !lost;
        sums.running += state == DR_SLOT_RUNNING && !lost;
        sums.ended += over || lost;
        sums.failed += state == DR_SLOT_FAILED || lost;
    }
    return sums;
}
