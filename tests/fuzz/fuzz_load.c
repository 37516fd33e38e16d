/*
 * dr_load with a plan that the input decides: payloads, shapes, slices,
 * strides and checksums, most of them right, some of them lies. The result is
 * an error, or what a copy element by element gives; memory beside the slice
 * is never touched.
 *
 * The file is in memory, and all its system calls are ours.
 */
#include "base/crc.h"
#include "data/load.h"
#include "io/pool.h"
#include "memory_file.h"

enum { FILE_BYTES = 2 * (1 << 20) + 300 * 1024 + 77, MAX_READS = 5, MAX_NDIM = 4, MAX_ELEMENTS = 60000, GUARD = 64 };

/* ---- the file ---- */

static uint8_t content[FILE_BYTES];
static unsigned reads_until_short; /* the read that gives only half */

static ssize_t pread_but_short(int fd, void *data, size_t size, off_t offset) {
    size = memory_left(size, offset);
    if (size > 0 && __atomic_fetch_sub(&reads_until_short, 1, __ATOMIC_RELAXED) == 1 && size > 1)
        size /= 2;
    return memory_pread(fd, data, size, offset);
}

/* Every other 64 KiB counts as cached, so that both ways of reading are taken. */
static int64_t memory_cached(int fd, off_t offset, size_t size) {
    (void)fd;
    return offset >> 16 & 1 ? (int64_t)size : 0;
}

static void set_up_file(void) {
    static uint64_t state;
    for (size_t i = 0; i < FILE_BYTES && state < FILE_BYTES; i++)
        content[i] = (uint8_t)((state = i * 0x9e3779b97f4a7c15u) >> 56);
    state = FILE_BYTES;
    memory_set_up(content, FILE_BYTES, &(struct memory_ways){pread_but_short, memory_cached});
}

/* ---- the plan ---- */

struct input {
    const uint8_t *at;
    size_t left;
};

static uint64_t take(struct input *in, unsigned bytes) {
    uint64_t value = 0;
    for (; bytes > 0 && in->left > 0; bytes--, in->left--)
        value = value << 8 | *in->at++;
    return value;
}

struct wanted {
    int64_t sizes[MAX_NDIM], offsets[MAX_NDIM], lengths[MAX_NDIM], strides[MAX_NDIM];
    uint8_t *memory, *expected, *crcs;
    size_t size;
    bool lie, corrupt; /* must be refused; must be found corrupt when anything is checked */
};

/* Row-major or column-major strides, with a gap behind each axis; gives the elements they span. */
static size_t make_strides(struct input *in, int ndim, struct wanted *w) {
    uint64_t kind = take(in, 1);
    int64_t stride = 1, span = 1;
    for (int i = 0; i < ndim; i++) {
        int d = kind & 1 ? i : ndim - 1 - i;
        int64_t length = w->lengths[d] > 0 ? w->lengths[d] : 1;
        w->strides[d] = stride;
        span += (length - 1) * stride;
        stride = stride * length + (int64_t)(kind >> 1 & 3);
    }
    return (size_t)span;
}

static void expect(struct wanted *w, const struct dr_read *r) {
    size_t item = r->chunk.dtype->item_size;
    int64_t index[MAX_NDIM] = {0};
    for (int d = 0; d < r->chunk.ndim; d++)
        if (w->lengths[d] == 0)
            return;
    for (;;) {
        int64_t from = 0, to = 0;
        for (int d = 0; d < r->chunk.ndim; d++) {
            from = from * w->sizes[d] + w->offsets[d] + index[d];
            to += index[d] * w->strides[d];
        }
        memcpy(w->expected + GUARD + (size_t)to * item, content + r->payload_offset + (size_t)from * item, item);
        int d = r->chunk.ndim - 1;
        for (; d >= 0 && ++index[d] == w->lengths[d]; d--)
            index[d] = 0;
        if (d < 0)
            return;
    }
}

static void make_crcs(struct wanted *w, struct dr_read *r, uint64_t kind) {
    size_t count = dr_crc_count(r->payload_offset, r->payload_size);
    r->has_whole_crc = kind == 2;
    r->whole_crc = dr_crc32(0, content + r->payload_offset, r->payload_size);
    if (kind != 1)
        return;
    w->crcs = malloc(4 * count + 1);
    FUZZ_CHECK(w->crcs);
    for (size_t i = 0; i < count; i++) {
        uint64_t lo, hi;
        dr_crc_range(r->payload_offset, r->payload_size, i, &lo, &hi);
        uint32_t crc = dr_crc32(0, content + lo, hi - lo);
        for (int b = 0; b < 4; b++)
            w->crcs[4 * i + (size_t)b] = (uint8_t)(crc >> (8 * b));
    }
    r->crcs = w->crcs;
}

/* Something about the read is changed that dr_load must find. */
static void make_lie(struct input *in, struct wanted *w, struct dr_read *r) {
    uint64_t kind = take(in, 1), value = take(in, 8);
    int d = r->chunk.ndim > 0 ? (int)(value % (uint64_t)r->chunk.ndim) : 0;
    w->lie = true;
    if (kind % 4 == 0)
        r->payload_offset = FILE_BYTES - r->payload_size + 1 + value % (UINT64_MAX / 4);
    else if (kind % 4 == 1)
        r->payload_size += 1 + value % (UINT64_MAX / 4);
    else if (kind % 4 == 2 && r->chunk.ndim > 0)
        w->offsets[d] = w->sizes[d] - w->lengths[d] + 1 + (int64_t)(value % (INT64_MAX / 2));
    else if (r->chunk.ndim > 0)
        w->lengths[d] = -1 - (int64_t)(value % (INT64_MAX / 2));
    else
        w->lie = false;
}

static void make_read(struct input *in, struct wanted *w, struct dr_read *r) {
    unsigned dtypes = 0;
    while (dr_dtypes[dtypes].name)
        dtypes++;
    const struct dr_dtype *dtype = &dr_dtypes[take(in, 1) % dtypes];
    int ndim = (int)(take(in, 1) % (MAX_NDIM + 1));
    uint64_t elements = 1, most = FILE_BYTES / dtype->item_size, wanted = 1;
    *w = (struct wanted){0};
    for (int d = 0; d < ndim; d++) {
        w->sizes[d] = (int64_t)(take(in, 3) % (most / elements + 1));
        elements *= w->sizes[d] ? (uint64_t)w->sizes[d] : 1;
        uint64_t room = MAX_ELEMENTS / wanted, size = (uint64_t)w->sizes[d];
        w->lengths[d] = (int64_t)(take(in, 2) % ((room < size ? room : size) + 1));
        w->offsets[d] = (int64_t)(take(in, 3) % (uint64_t)(w->sizes[d] - w->lengths[d] + 1));
        wanted *= w->lengths[d] ? (uint64_t)w->lengths[d] : 1;
    }
    *r = (struct dr_read){.chunk = {dtype, ndim, w->sizes}, .offsets = w->offsets, .lengths = w->lengths};
    FUZZ_CHECK(dr_shape_bytes(&r->chunk, &r->payload_size) && r->payload_size <= FILE_BYTES);
    r->payload_offset = take(in, 3) % (FILE_BYTES - r->payload_size + 1);
    size_t bytes = make_strides(in, ndim, w) * dtype->item_size;
    w->size = bytes + 2 * (size_t)GUARD;
    w->memory = malloc(w->size);
    w->expected = malloc(w->size);
    FUZZ_CHECK(w->memory && w->expected);
    memset(w->memory, 0x5a, w->size);
    memset(w->expected, 0x5a, w->size);
    r->memory = w->memory + GUARD;
    r->strides = w->strides;
    expect(w, r);
    uint64_t flags = take(in, 1);
    make_crcs(w, r, flags & 3);
    if (flags >> 2 == 1)
        make_lie(in, w, r);
    if (flags >> 2 == 2 && r->has_whole_crc) {
        r->whole_crc ^= 1;
        w->corrupt = true;
    }
}

static bool reads_whole(const struct wanted *w, const struct dr_read *r) {
    uint64_t bytes = r->chunk.dtype->item_size;
    for (int d = 0; d < r->chunk.ndim; d++)
        bytes *= (uint64_t)w->lengths[d];
    return bytes == r->payload_size;
}

static void check_result(int rc, const struct dr_error *error, const struct wanted *wanted, const struct dr_read *reads,
                         size_t count, bool checksum) {
    bool refused = false;
    for (size_t i = 0; i < count; i++)
        refused |= wanted[i].lie || (wanted[i].corrupt && checksum && reads_whole(&wanted[i], &reads[i]));
    FUZZ_CHECK(rc == -error->err);
    FUZZ_CHECK((rc < 0) == refused);
    for (size_t i = 0; i < count && rc == 0; i++)
        FUZZ_CHECK(memcmp(wanted[i].memory, wanted[i].expected, wanted[i].size) == 0);
    bool lies = false;
    for (size_t i = 0; i < count; i++)
        lies |= wanted[i].lie;
    for (size_t i = 0; i < count && lies; i++)
        FUZZ_CHECK(!reads[i].touched);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const name = "file";
    static const struct dr_control never;
    struct input in = {data, size};
    struct wanted wanted[MAX_READS];
    struct dr_read reads[MAX_READS];
    struct dr_stream_stats stats;
    struct dr_error error;
    uint64_t flags = take(&in, 1);
    const struct dr_options options = {.engine = "threads",
                                       .direct = flags & 1 ? DR_DIRECT_AUTO : DR_DIRECT_OFF,
                                       .queue_depth = 1 + (flags >> 1 & 3),
                                       .block_size = DR_CRC_BLOCK << (flags >> 3 & 1),
                                       .workers = 1 + (flags >> 4 & 1),
                                       .checksum = flags >> 5 & 1};
    size_t count = 1 + take(&in, 1) % MAX_READS;
    set_up_file();
    reads_until_short = (unsigned)take(&in, 1);
    for (size_t i = 0; i < count; i++)
        make_read(&in, &wanted[i], &reads[i]);
    dr_error_clear(&error);
    struct dr_input input;
    FUZZ_CHECK(dr_input_init(&input, "dir", &name, 1, &error) == 0);
    int rc = dr_load(&input, reads, count, &options, &never, &stats, &error);
    FUZZ_CHECK(input.files[0].holders == 0);
    dr_input_destroy(&input);
    check_result(rc, &error, wanted, reads, count, options.checksum);
    for (size_t i = 0; i < count; i++) {
        free(wanted[i].memory);
        free(wanted[i].expected);
        free(wanted[i].crcs);
    }
    return 0;
}

size_t fuzz_seed(unsigned index, uint8_t out[FUZZ_SEED_MAX]) {
    enum { SEEDS = 24, SIZE = 200 };
    uint64_t state = index + 1;
    if (index >= SEEDS)
        return 0;
    for (size_t i = 0; i < SIZE; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        out[i] = (uint8_t)(state >> 56);
    }
    return SIZE;
}
