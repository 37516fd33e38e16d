/* The problems that were found: kept in bounded room, merged where they touch. See verify_record.h. */
#include "data/verify_record.h"

#include "base/array.h"

#include <assert.h>
#include <stdlib.h>

/* Of one record; at least one is kept of each. */
enum { MOST_KEPT = 64 };

static bool joins(const struct dr_problem *a, const struct dr_problem *b) {
    return a->check == b->check && a->what == b->what && a->err == b->err && a->offset <= b->offset + b->length &&
           b->offset <= a->offset + a->length;
}

static void join(struct dr_problem *into, const struct dr_problem *other) {
    uint64_t end = into->offset + into->length, other_end = other->offset + other->length;
    into->offset = into->offset < other->offset ? into->offset : other->offset;
    into->length = (end > other_end ? end : other_end) - into->offset;
    into->has_crcs = false;
}

/* Holds the lock. */
static void keep_problem(struct dr_verify *v, const struct dr_problem *problem) {
    struct dr_findings *f = v->findings;
    assert(problem->check < v->count && problem->what);
    struct dr_verify_noted *noted = &v->noted[problem->check];
    if (noted->count > 0 && joins(&f->problems[noted->last], problem)) {
        join(&f->problems[noted->last], problem);
        return;
    }
    if (noted->count >= MOST_KEPT) {
        f->unkept++;
        return;
    }
    DR_NEW_ERROR(ignored);
    if (DR_ARRAY_RESERVE(f->problems, f->count, f->room, 1, &ignored) < 0) {
        v->no_memory = true;
        return;
    }
    noted->last = (uint32_t)f->count;
    noted->count++;
    f->problems[f->count++] = *problem;
}

void dr_verify_note(struct dr_verify *v, const struct dr_problem *problem) {
    pthread_mutex_lock(&v->lock);
    keep_problem(v, problem);
    pthread_mutex_unlock(&v->lock);
}

static int by_place(const void *a, const void *b, void *context) {
    const struct dr_verify *v = context;
    const struct dr_problem *x = a, *y = b;
    size_t p = v->checks[x->check].file, q = v->checks[y->check].file;
    if (p != q)
        return p < q ? -1 : 1;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return (x->check > y->check) - (x->check < y->check);
}

void dr_verify_sort(struct dr_verify *v) {
    struct dr_findings *f = v->findings;
    size_t kept = 0;
    if (f->count > 0)
        qsort_r(f->problems, f->count, sizeof *f->problems, by_place, v);
    for (size_t i = 0; i < f->count; i++)
        if (kept > 0 && joins(&f->problems[kept - 1], &f->problems[i]))
            join(&f->problems[kept - 1], &f->problems[i]);
        else
            f->problems[kept++] = f->problems[i];
    f->count = kept;
}

void dr_findings_destroy(struct dr_findings *findings) {
    free(findings->problems);
    *findings = (struct dr_findings){0};
}
