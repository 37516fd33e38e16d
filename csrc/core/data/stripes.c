/* Writing stripes of a file. See stripes.h. */
#include "data/stripes.h"

#include "base/align.h"
#include "base/crc.h"
#include "record/region.h"

#include <assert.h>
#include <string.h>

/* One call, for its workers. */
struct run {
    const struct dr_stripes *stripes;
    struct dr_output *output;
    struct dr_workers workers;
};

/* ---- what lies in a range of the file ---- */

/* The first of `count` things, each of which begins with its payload, that ends behind a byte of the file. */
static size_t first_behind(const void *things, size_t count, size_t size, uint64_t at) {
    size_t lo = 0, hi = count;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        const struct dr_payload *payload = (const void *)((const uint8_t *)things + middle * size);
        if (payload->offset + payload->size <= at)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

static size_t first_patch(const struct dr_stripes *s, uint64_t at) {
    return first_behind(s->patches, s->patch_count, sizeof *s->patches, at);
}

static size_t first_payload(const struct dr_stripes *s, uint64_t at) {
    return first_behind(s->payloads, s->payload_count, sizeof *s->payloads, at);
}

/* The part of a payload that lies in [lo, hi); false where there is none. */
static bool clip(const struct dr_payload *p, uint64_t lo, uint64_t hi, uint64_t *from, uint64_t *to) {
    *from = lo, *to = hi;
    return dr_clip(p->offset, p->offset + p->size, from, to);
}

/* Copies what the patches have of the bytes [lo, hi) to `out`. */
static void gather(const struct dr_stripes *s, uint64_t lo, uint64_t hi, uint8_t *out) {
    uint64_t from, to;
    for (size_t i = first_patch(s, lo); i < s->patch_count && s->patches[i].payload.offset < hi; i++) {
        const struct dr_patch *p = &s->patches[i];
        if (!clip(&p->payload, lo, hi, &from, &to))
            continue;
        struct dr_region region;
        dr_region_init(&region, &p->shape, p->offsets, p->lengths, (void *)(uintptr_t)p->data, p->strides);
        dr_region_gather(&region, from - p->payload.offset, to - p->payload.offset, out + (from - lo));
    }
}

size_t dr_stripe_crcs(const struct dr_stripes *s, const struct dr_stripe *stripe) {
    size_t count = 0;
    uint64_t from, to;
    for (size_t i = first_payload(s, stripe->lo); i < s->payload_count && s->payloads[i].offset < stripe->hi; i++)
        if (clip(&s->payloads[i], stripe->lo, stripe->hi, &from, &to))
            count += dr_crc_count(from, to - from);
    return count;
}

static void sum(const struct run *run, const struct dr_stripe *stripe, const uint8_t *data, uint64_t *crc_ns) {
    const struct dr_stripes *s = run->stripes;
    uint32_t *next = stripe->crcs;
    uint64_t from, to, lo, hi;
    for (size_t i = first_payload(s, stripe->lo); i < s->payload_count && s->payloads[i].offset < stripe->hi; i++) {
        if (!clip(&s->payloads[i], stripe->lo, stripe->hi, &from, &to))
            continue;
        for (size_t k = 0, blocks = dr_crc_count(from, to - from); k < blocks; k++) {
            dr_crc_range(from, to - from, k, &lo, &hi);
            *next++ = dr_watch_crc32(run->output->options.watch, crc_ns, 0, data + (lo - stripe->lo), hi - lo);
        }
    }
}

/* ---- filling ---- */

static int fill_work(void *context, unsigned index, struct dr_error *error) {
    (void)index, (void)error;
    struct run *run = context;
    for (size_t i; dr_workers_take(&run->workers, &i);) {
        const struct dr_stripe *stripe = &run->stripes->stripes[i];
        gather(run->stripes, stripe->lo, stripe->hi, stripe->shared);
    }
    return 0;
}

int dr_stripes_fill(const struct dr_stripes *stripes, unsigned workers, const struct dr_control *control,
                    struct dr_error *error) {
    struct run run = {.stripes = stripes};
    return dr_workers_share(&run.workers, stripes->count, workers, fill_work, &run, control, error);
}

/* ---- writing ---- */

static void fill_block(const struct run *run, const struct dr_stripe *stripe, unsigned worker, uint8_t *data,
                       size_t padded) {
    struct dr_watch *watch = run->output->options.watch;
    size_t size = (size_t)(stripe->hi - stripe->lo);
    struct dr_span span = {
        .begin = dr_watch_now(watch), .offset = stripe->lo, .size = size, .step = DR_STEP_FILL, .worker = worker};
    if (stripe->shared)
        memcpy(data, stripe->shared, size);
    else
        gather(run->stripes, stripe->lo, stripe->hi, data);
    if (stripe->crcs)
        sum(run, stripe, data, &span.crc);
    memset(data + size, 0, padded - size);
    dr_watch_note(watch, span);
}

static int write_stripes(struct run *run, struct dr_engine *engine, struct dr_error *error) {
    struct dr_output *output = run->output;
    for (size_t i; dr_workers_take(&run->workers, &i);) {
        const struct dr_stripe *stripe = &run->stripes->stripes[i];
        assert(stripe->lo % DR_ALIGNMENT == 0 && stripe->lo < stripe->hi);
        assert(stripe->hi - stripe->lo <= output->options.block_size);
        struct dr_request *request;
        int rc = dr_output_take(&run->workers, engine, &request, error);
        if (rc < 0 || !request)
            return rc;
        size_t size = (size_t)(stripe->hi - stripe->lo);
        size_t padded = output->direct ? (size_t)dr_align_up(size, DR_ALIGNMENT) : size;
        fill_block(run, stripe, engine->worker, request->data, padded);
        rc = dr_output_submit(output, engine, request, stripe->lo, padded, error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int write_work(void *context, unsigned index, struct dr_error *error) {
    struct run *run = context;
    struct dr_engine *engine = run->output->engines[index];
    int rc = write_stripes(run, engine, error);
    if (rc < 0 || dr_workers_stopped(&run->workers))
        dr_engine_drain(engine);
    return rc;
}

int dr_stripes_write(const struct dr_stripes *stripes, struct dr_output *output, uint64_t expected,
                     const struct dr_control *control, struct dr_error *error) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < stripes->count; i++)
        bytes += stripes->stripes[i].hi - stripes->stripes[i].lo;
    unsigned workers = dr_output_workers(output, bytes);
    struct run run = {.stripes = stripes, .output = output};
    int rc = dr_output_engines(output, workers, expected, error);
    return rc < 0 ? rc : dr_workers_share(&run.workers, stripes->count, workers, write_work, &run, control, error);
}
