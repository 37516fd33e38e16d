/* How far work is, in memory that processes may share. See slots.h. */
#include "tools/slots.h"

#include "base/clock.h"
#include "io/sys.h"

#include <unistd.h>

enum { GRACE_MS = 2000 }; /* for a slot that has joined and does not begin, once no other is at work */

void dr_slots_wake(struct dr_slots *slots) {
    atomic_fetch_add(&slots->changes, 1);
    dr_sys.wake_all(&slots->changes);
}

void dr_slots_wait(const struct dr_onlooker *onlooker, int timeout_ms) {
    dr_sys.wait_for(&onlooker->slots->changes, onlooker->changes, timeout_ms);
}

bool dr_slots_claim(struct dr_slots *slots) { return atomic_exchange(&slots->claimed, 1) == 0; }

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

static void add_slot(struct dr_sums *sums, struct dr_slot *slot) {
    uint32_t state = atomic_load(&slot->state);
    if (state == DR_SLOT_FREE)
        return;
    uint64_t total = atomic_load(&slot->total), done = atomic_load(&slot->done);
    sums->total = add(sums->total, total);
    sums->done = add(sums->done, done < total ? done : total);
    bool ended = state == DR_SLOT_DONE || state == DR_SLOT_FAILED;
    bool lost = !ended && !dr_sys.process_exists((pid_t)atomic_load(&slot->process));
    sums->joined += state == DR_SLOT_JOINED && !lost;
    sums->running += state == DR_SLOT_RUNNING && !lost;
    sums->ended += ended || lost;
    sums->failed += state == DR_SLOT_FAILED || lost;
}

struct dr_sums dr_slots_look(struct dr_onlooker *onlooker) {
    struct dr_sums sums = {0};
    uint64_t now = dr_clock_ms();
    onlooker->changes = atomic_load(&onlooker->slots->changes);
    for (size_t i = 0; i < onlooker->count; i++)
        add_slot(&sums, &onlooker->slots->slot[i]);
    bool busy = sums.running > 0 || sums.ended == 0;
    if (busy || onlooker->busy_ms == 0)
        onlooker->busy_ms = now;
    sums.over = !busy && (sums.joined == 0 || now - onlooker->busy_ms > GRACE_MS);
    return sums;
}
