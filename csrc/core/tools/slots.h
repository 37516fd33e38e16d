/*
 * How far work is, in memory that processes may share: a slot for each that takes part.
 *
 * Each writes its own slot, its workers the count in it (watch.h); anybody who
 * has the memory may read, and wait for a slot to end. All is atomic, nothing
 * is locked, and nobody waits for a slot unless he asks to. Memory of zeros is
 * ready for use. What another process puts into it is not believed: whatever
 * it holds, it is only added up and shown.
 */
#ifndef DCPRING_SLOTS_H
#define DCPRING_SLOTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum dr_slot_state {
    DR_SLOT_FREE,
    DR_SLOT_JOINED,  /* will begin */
    DR_SLOT_RUNNING, /* total says how much there is to do */
    DR_SLOT_DONE,
    DR_SLOT_FAILED,
};

struct dr_slot {
    _Alignas(64) _Atomic uint64_t done; /* bytes */
    _Atomic uint64_t total;             /* bytes */
    _Atomic uint32_t state;
    _Atomic uint32_t process;
};

struct dr_slots {
    _Alignas(64) _Atomic uint32_t changes; /* a futex: of states */
    _Atomic uint32_t claimed;              /* somebody shows them */
    struct dr_slot slot[];
};

struct dr_sums {
    uint64_t done, total; /* bytes of all slots */
    uint32_t joined, running, ended, failed; /* slots */
    bool over; /* nobody is at work any more; who joined has had the time to begin */
};

static inline size_t dr_slots_size(size_t count) { return sizeof(struct dr_slots) + count * sizeof(struct dr_slot); }

/* This process will do work, and tell of it in a slot. */
void dr_slots_join(struct dr_slots *slots, size_t index);

void dr_slots_begin(struct dr_slots *slots, size_t index, uint64_t total);

/* What has ended well is done wholly, whatever was counted: a plan says only about how many bytes there will be. */
void dr_slots_end(struct dr_slots *slots, size_t index, bool failed);

/* True for the first that asks: of several that might show the slots, one does. */
bool dr_slots_claim(struct dr_slots *slots);

/* Wakes all that wait. */
void dr_slots_wake(struct dr_slots *slots);

/* ---- who looks on ---- */

struct dr_onlooker {
    struct dr_slots *slots;
    size_t count;
    uint32_t changes; /* seen by the last look */
    uint64_t busy_ms; /* when work was last under way */
};

/* A slot whose process is gone counts as failed. */
struct dr_sums dr_slots_look(struct dr_onlooker *onlooker);

/*
 * Returns when a state has changed since the last look, or after the time, or
 * for no reason.
 */
void dr_slots_wait(const struct dr_onlooker *onlooker, int timeout_ms);

#endif
