/* Random tensors. See sample.h. */
#include "sample.h"

#include "base/crc.h"
#include "io/sys.h"

#include <liburing.h>

static const struct dr_control never;

/* ---- making them ---- */

static uint64_t count_of(const int64_t *sizes, int ndim) {
    uint64_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= (uint64_t)sizes[d];
    return count;
}

/* Strides in random order with gaps; returns the elements they span. */
static uint64_t random_strides(struct rng *rng, int ndim, const int64_t *lengths, int64_t *strides) {
    int order[SAMPLE_MAX_NDIM];
    for (int d = 0; d < ndim; d++)
        order[d] = d;
    for (int i = ndim - 1; i > 0; i--) {
        int j = (int)rng_below(rng, (uint64_t)i + 1), swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
    }
    int64_t stride = 1, span = 1;
    for (int i = 0; i < ndim; i++) {
        int d = order[i];
        int64_t length = lengths[d] > 0 ? lengths[d] : 1;
        if (rng_below(rng, 4) == 0)
            stride += (int64_t)rng_below(rng, 3);
        strides[d] = stride;
        span += (length - 1) * stride;
        stride *= length;
    }
    return (uint64_t)span;
}

static void contiguous_strides(int ndim, const int64_t *lengths, int64_t *strides) {
    int64_t stride = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= lengths[d] > 1 ? lengths[d] : 1;
    }
}

/* Goes on to the next element in row-major order; false behind the last one. */
static bool next_index(int ndim, const int64_t *lengths, int64_t *index) {
    for (int d = ndim - 1; d >= 0; d--) {
        if (++index[d] < lengths[d])
            return true;
        index[d] = 0;
    }
    return false;
}

static int64_t at_index(int ndim, const int64_t *index, const int64_t *offsets, const int64_t *strides) {
    int64_t at = 0;
    for (int d = 0; d < ndim; d++)
        at += (index[d] + (offsets ? offsets[d] : 0)) * strides[d];
    return at;
}

static void pack(const struct sample *s, size_t item) {
    int64_t index[SAMPLE_MAX_NDIM] = {0};
    int ndim = s->source.shape.ndim;
    uint8_t *out = s->payload;
    if (s->source.size == 0)
        return;
    do {
        memcpy(out, s->memory + (size_t)at_index(ndim, index, NULL, s->strides) * item, item);
        out += item;
    } while (next_index(ndim, s->sizes, index));
}

static void finish_tensor(struct sample *s, struct rng *rng, const struct dr_dtype *dtype, int ndim, bool strided) {
    size_t item = dtype->item_size;
    uint64_t bytes = count_of(s->sizes, ndim) * item, span = count_of(s->sizes, ndim);
    if (strided)
        span = random_strides(rng, ndim, s->sizes, s->strides);
    s->memory = check_alloc(span * item);
    rng_fill(rng, s->memory, span * item);
    s->source = (struct dr_source){.shape = {dtype, ndim, s->sizes},
                                   .data = s->memory,
                                   .strides = strided ? s->strides : NULL,
                                   .size = bytes,
                                   .total = bytes};
    s->payload = check_alloc(bytes);
    if (strided)
        pack(s, item);
    else
        memcpy(s->payload, s->memory, bytes);
}

void sample_shape(struct sample *s, struct rng *rng, const char *dtype, int ndim, const int64_t *sizes) {
    *s = (struct sample){0};
    memcpy(s->sizes, sizes, (size_t)ndim * sizeof *sizes);
    finish_tensor(s, rng, dr_dtype_by_name(dtype), ndim, false);
}

bool sample_has_uring(void) {
    struct io_uring ring;
    if (dr_sys_real.uring_init(1, &ring) < 0)
        return false;
    io_uring_queue_exit(&ring);
    return true;
}

void sample_tensor(struct sample *s, struct rng *rng, uint64_t max_bytes, bool strided) {
    *s = (struct sample){0};
    unsigned dtypes = 0;
    while (dr_dtypes[dtypes].name)
        dtypes++;
    const struct dr_dtype *dtype = &dr_dtypes[rng_below(rng, dtypes)];
    int ndim = (int)rng_below(rng, SAMPLE_MAX_NDIM + 1);
    uint64_t left = max_bytes / dtype->item_size;
    for (int d = 0; d < ndim; d++) {
        uint64_t most = d == ndim - 1 ? left : 1 + rng_below(rng, 40);
        if (most > left)
            most = left;
        s->sizes[d] = (int64_t)(most ? 1 + rng_below(rng, most) : 1);
        left /= (uint64_t)s->sizes[d];
    }
    if (ndim > 0 && rng_below(rng, 30) == 0)
        s->sizes[rng_below(rng, (uint64_t)ndim)] = 0;
    finish_tensor(s, rng, dtype, ndim, strided);
}

void sample_bytes(struct sample *s, struct rng *rng, uint64_t size) {
    *s = (struct sample){0};
    s->sizes[0] = (int64_t)size;
    s->memory = check_alloc(size);
    s->payload = check_alloc(size);
    rng_fill(rng, s->memory, size);
    memcpy(s->payload, s->memory, size);
    s->source = (struct dr_source){.data = s->memory, .size = size, .total = size};
}

void sample_free(struct sample *samples, size_t count) {
    for (size_t i = 0; i < count; i++) {
        free(samples[i].memory);
        free(samples[i].payload);
        free(samples[i].crcs);
    }
}

/* ---- saving ---- */

static void note_place(struct sample *s, const struct dr_placed *placed) {
    size_t count = dr_crc_count(placed->payload_offset, placed->payload_size);
    s->placed = *placed;
    s->placed.crcs = NULL;
    free(s->crcs);
    s->crcs = check_alloc(4 * count);
    for (size_t i = 0; i < count; i++)
        for (int b = 0; b < 4; b++)
            s->crcs[4 * i + (size_t)b] = (uint8_t)(placed->crcs[i] >> (8 * b));
}

static int write_parts(struct dr_writer *w, struct sample *s, const struct dr_control *control,
                       struct dr_error *error) {
    struct dr_placed placed;
    int rc = 0;
    for (uint64_t done = 0; done < s->source.total && rc == 0; done += s->part_bytes) {
        struct dr_source part = s->source;
        uint64_t left = part.total - done;
        part.data = s->memory + done;
        part.part_offset = done;
        part.size = left < s->part_bytes ? left : s->part_bytes;
        rc = dr_writer_write(w, &part, 1, &placed, control, error);
    }
    if (rc == 0)
        note_place(s, &placed);
    return rc;
}

static int write_window(struct dr_writer *w, struct sample *samples, size_t count, const struct dr_control *control,
                        struct dr_error *error) {
    struct dr_source *sources = check_alloc(count * sizeof *sources);
    struct dr_placed *placed = check_alloc(count * sizeof *placed);
    for (size_t i = 0; i < count; i++)
        sources[i] = samples[i].source;
    int rc = dr_writer_write(w, sources, count, placed, control, error);
    for (size_t i = 0; i < count && rc == 0; i++)
        note_place(&samples[i], &placed[i]);
    free(sources);
    free(placed);
    return rc;
}

static int write_samples(struct dr_writer *w, struct sample *samples, size_t count, size_t window,
                         const struct dr_control *control, struct dr_error *error) {
    for (size_t i = 0, end; i < count; i = end) {
        end = i + 1;
        while (!samples[i].part_bytes && end < count && end < i + window && !samples[end].part_bytes)
            end++;
        int rc = samples[i].part_bytes ? write_parts(w, &samples[i], control, error)
                                       : write_window(w, samples + i, end - i, control, error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int sample_save(const char *name, struct sample *samples, size_t count, size_t window, uint64_t size_hint,
                const struct dr_options *options, const struct dr_control *control, struct dr_writer_stats *stats,
                struct dr_error *error) {
    struct dr_writer *w;
    struct dr_writer_stats ignored;
    dr_error_clear(error);
    int rc = dr_writer_open(&w, check_dir, name, size_hint, options, error);
    if (rc < 0)
        return rc;
    rc = write_samples(w, samples, count, window, control ? control : &never, error);
    if (rc == 0)
        rc = dr_writer_finish(w, NULL, control ? control : &never, error);
    dr_writer_stats(w, stats ? stats : &ignored);
    dr_writer_close(w);
    return rc;
}

static uint64_t check_record(const uint8_t *file, uint64_t at, const struct sample *s, bool checksum) {
    const struct dr_shape *shape = &s->source.shape;
    uint8_t head[DR_RECORD_HEAD_MAX], tail[DR_RECORD_TAIL_MAX];
    size_t head_size = shape->dtype ? dr_record_head(shape, at, head) : 0, tail_size = 0;
    uint64_t total = s->source.total, payload = at + head_size;
    if (shape->dtype)
        tail_size = dr_record_tail(shape, at, head_size, checksum ? dr_crc32(0, s->payload, total) : 0, tail);
    CHECK_EQ(s->placed.offset, at);
    CHECK_EQ(s->placed.length, head_size + total + tail_size);
    CHECK_EQ(s->placed.payload_offset, payload);
    CHECK_EQ(s->placed.payload_size, total);
    CHECK_BYTES(file + at, head, head_size);
    CHECK_BYTES(file + payload, s->payload, total);
    CHECK_BYTES(file + payload + total, tail, tail_size);
    for (size_t i = 0; checksum && i < dr_crc_count(payload, total); i++) {
        uint64_t lo, hi;
        dr_crc_range(payload, total, i, &lo, &hi);
        uint32_t crc = dr_crc32(0, file + lo, hi - lo);
        const uint8_t stored[4] = {(uint8_t)crc, (uint8_t)(crc >> 8), (uint8_t)(crc >> 16), (uint8_t)(crc >> 24)};
        CHECK_BYTES(s->crcs + 4 * i, stored, 4);
    }
    return payload + total + tail_size;
}

void sample_check_file(const char *name, const struct sample *samples, size_t count, bool checksum) {
    size_t size;
    uint8_t *file = check_read_file(name, &size);
    CHECK(file);
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(at + samples[i].placed.length, <=, size);
        at = check_record(file, at, &samples[i], checksum);
    }
    CHECK_EQ(size, at);
    free(file);
}

/* ---- loading ---- */

static const struct dr_dtype *dtype_of(const struct sample *s) {
    return s->source.shape.dtype ? s->source.shape.dtype : dr_dtype_by_name("uint8");
}

static int ndim_of(const struct sample *s) { return s->source.shape.dtype ? s->source.shape.ndim : 1; }

static void expect_slice(struct target *t, const struct sample *s, size_t item) {
    int ndim = ndim_of(s);
    int64_t index[SAMPLE_MAX_NDIM] = {0}, payload_strides[SAMPLE_MAX_NDIM];
    contiguous_strides(ndim, s->sizes, payload_strides);
    if (t->needed == 0)
        return;
    do {
        size_t from = (size_t)at_index(ndim, index, t->offsets, payload_strides) * item;
        memcpy(t->expected + (size_t)at_index(ndim, index, NULL, t->strides) * item, s->payload + from, item);
    } while (next_index(ndim, t->lengths, index));
}

void target_finish(struct target *t, struct dr_read *read, const struct sample *s, size_t file, struct rng *rng,
                   bool strided) {
    int ndim = ndim_of(s);
    size_t item = dtype_of(s)->item_size;
    uint64_t span = count_of(t->lengths, ndim);
    t->needed = span * item;
    if (strided)
        span = random_strides(rng, ndim, t->lengths, t->strides);
    else
        contiguous_strides(ndim, t->lengths, t->strides);
    t->size = span * item;
    t->memory = check_alloc(t->size);
    t->expected = check_alloc(t->size);
    memset(t->memory, 0x5a, t->size);
    memset(t->expected, 0x5a, t->size);
    expect_slice(t, s, item);
    *read = (struct dr_read){.file = file,
                             .payload_offset = s->placed.payload_offset,
                             .payload_size = s->placed.payload_size,
                             .chunk = {dtype_of(s), ndim, s->sizes},
                             .offsets = t->offsets,
                             .lengths = t->lengths,
                             .memory = t->memory,
                             .strides = t->strides,
                             .crcs = s->crcs};
}

void target_init(struct target *t, struct dr_read *read, const struct sample *s, size_t file, struct rng *rng,
                 enum target_slice slice, bool strided) {
    *t = (struct target){0};
    for (int d = 0; d < ndim_of(s); d++) {
        t->lengths[d] = s->sizes[d];
        if (slice == SLICE_RANDOM && rng_below(rng, 2))
            t->lengths[d] = (int64_t)rng_below(rng, (uint64_t)s->sizes[d] + 1);
        t->offsets[d] = (int64_t)rng_below(rng, (uint64_t)(s->sizes[d] - t->lengths[d]) + 1);
    }
    target_finish(t, read, s, file, rng, strided);
}

void target_check(const struct target *t) { CHECK_BYTES(t->memory, t->expected, t->size); }

bool target_is_untouched(const struct target *t) {
    for (size_t i = 0; i < t->size; i++)
        if (t->memory[i] != 0x5a)
            return false;
    return true;
}

void target_free(struct target *targets, size_t count) {
    for (size_t i = 0; i < count; i++) {
        free(targets[i].memory);
        free(targets[i].expected);
    }
}

int sample_dr_load(const char *const *names, size_t name_count, struct dr_read *reads, size_t count,
                   const struct dr_options *options, const struct dr_control *control, struct dr_stream_stats *stats,
                   struct dr_error *error) {
    struct dr_input input;
    int rc = dr_input_init(&input, check_dir, names, name_count, error);
    if (rc == 0)
        rc = dr_load(&input, reads, count, options, control, stats, error);
    dr_input_destroy(&input);
    return rc;
}

int sample_dr_locate(const char *const *names, size_t name_count, struct dr_lookup *lookups, size_t count,
                     const struct dr_control *control, struct dr_error *error) {
    struct dr_input input;
    int rc = dr_input_init(&input, check_dir, names, name_count, error);
    if (rc == 0)
        rc = dr_locate(&input, lookups, count, control, error);
    dr_input_destroy(&input);
    return rc;
}

int sample_load_all(const char *name, const struct sample *samples, size_t count, const struct dr_options *options,
                    const struct dr_control *control, struct dr_stream_stats *stats, struct dr_error *error) {
    struct rng rng = {77};
    struct dr_stream_stats ignored;
    struct target *targets = check_alloc(count * sizeof *targets);
    struct dr_read *reads = check_alloc(count * sizeof *reads);
    for (size_t i = 0; i < count; i++)
        target_init(&targets[i], &reads[i], &samples[i], 0, &rng, SLICE_WHOLE, false);
    dr_error_clear(error);
    int rc =
        sample_dr_load(&name, 1, reads, count, options, control ? control : &never, stats ? stats : &ignored, error);
    for (size_t i = 0; i < count && rc == 0; i++)
        target_check(&targets[i]);
    target_free(targets, count);
    free(targets);
    free(reads);
    return rc;
}
