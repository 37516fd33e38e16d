/* Strided copies against an element by element oracle, in windows of any position. */
#include "check.h"
#include "record/region.h"

enum { MAX_NDIM = 5, ROUNDS = 4000 };

struct box {
    struct dr_shape chunk;
    int64_t sizes[MAX_NDIM], offsets[MAX_NDIM], lengths[MAX_NDIM], strides[MAX_NDIM];
    int64_t elements;     /* of the chunk */
    int64_t memory_size;  /* elements that the strides span */
    int64_t memory_start; /* element of memory where index 0 is: not 0 with negative strides */
    bool empty;
};

static void shuffle(struct rng *rng, int *order, int count) {
    for (int i = 0; i < count; i++)
        order[i] = i;
    for (int i = count - 1; i > 0; i--) {
        int j = (int)rng_below(rng, (uint64_t)i + 1), swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
    }
}

/* Strides for the box's axes in any order, with gaps now and then, some of them negative. */
static void make_strides(struct rng *rng, struct box *box) {
    int order[MAX_NDIM], ndim = box->chunk.ndim;
    shuffle(rng, order, ndim);
    if (rng_below(rng, 3) == 0)
        for (int i = 0; i < ndim; i++)
            order[i] = ndim - 1 - i;
    int64_t stride = 1;
    bool padded = rng_below(rng, 2), negative = rng_below(rng, 4) == 0;
    box->memory_size = 1;
    box->memory_start = 0;
    for (int i = 0; i < ndim; i++) {
        int d = order[i];
        int64_t length = box->lengths[d] > 0 ? box->lengths[d] : 1;
        if (padded && rng_below(rng, 3) == 0)
            stride += (int64_t)rng_below(rng, 4);
        box->strides[d] = stride;
        box->memory_size += (length - 1) * stride;
        if (negative && rng_below(rng, 2)) {
            box->strides[d] = -stride;
            box->memory_start += (length - 1) * stride;
        }
        stride *= length;
    }
}

static struct box make_box(struct rng *rng) {
    struct box box = {.elements = 1};
    const struct dr_dtype *dtypes[] = {dr_dtype_by_name("uint8"), dr_dtype_by_name("float16"),
                                       dr_dtype_by_name("float32"), dr_dtype_by_name("int64"),
                                       dr_dtype_by_name("complex128")};
    int ndim = (int)rng_below(rng, MAX_NDIM + 1);
    int64_t largest = (const int64_t[]){1, 400, 60, 20, 9, 6}[ndim];
    for (int d = 0; d < ndim; d++) {
        box.sizes[d] = 1 + (int64_t)rng_below(rng, (uint64_t)largest);
        if (rng_below(rng, 40) == 0)
            box.sizes[d] = 0;
        box.lengths[d] = box.sizes[d];
        if (rng_below(rng, 2))
            box.lengths[d] = (int64_t)rng_below(rng, (uint64_t)box.sizes[d] + 1);
        box.offsets[d] = (int64_t)rng_below(rng, (uint64_t)(box.sizes[d] - box.lengths[d]) + 1);
        box.elements *= box.sizes[d];
        box.empty |= box.lengths[d] == 0;
    }
    box.chunk = (struct dr_shape){dtypes[rng_below(rng, 5)], ndim, NULL};
    make_strides(rng, &box);
    return box;
}

/* For each element of the box in row-major order: where it is in the payload and in memory. */
struct element {
    int64_t payload, memory;
};

static struct element *list_elements(const struct box *box, size_t *count) {
    int ndim = box->chunk.ndim;
    *count = 1;
    for (int d = 0; d < ndim; d++)
        *count *= (size_t)box->lengths[d];
    struct element *list = check_alloc(*count * sizeof *list);
    int64_t index[MAX_NDIM] = {0};
    for (size_t i = 0; i < *count; i++) {
        int64_t payload = 0, memory = box->memory_start;
        for (int d = 0; d < ndim; d++) {
            payload = payload * box->sizes[d] + box->offsets[d] + index[d];
            memory += index[d] * box->strides[d];
        }
        list[i] = (struct element){payload, memory};
        for (int d = ndim - 1; d >= 0 && ++index[d] == box->lengths[d]; d--)
            index[d] = 0;
    }
    return list;
}

struct fixture {
    struct box box;
    struct dr_region region;
    size_t item, payload_bytes, memory_bytes;
    uint8_t *payload, *memory;
    struct element *list;
    size_t count;
};

/* In place: the shape's sizes point into the fixture. */
static void set_up(struct fixture *f, struct rng *rng) {
    f->box = make_box(rng);
    f->box.chunk.sizes = f->box.sizes;
    f->item = f->box.chunk.dtype->item_size;
    f->payload_bytes = (size_t)f->box.elements * f->item;
    f->memory_bytes = (size_t)f->box.memory_size * f->item;
    f->payload = check_alloc(f->payload_bytes);
    f->memory = check_alloc(f->memory_bytes);
    rng_fill(rng, f->payload, f->payload_bytes);
    rng_fill(rng, f->memory, f->memory_bytes);
    f->list = list_elements(&f->box, &f->count);
    dr_region_init(&f->region, &f->box.chunk, f->box.offsets, f->box.lengths,
                   f->memory + (size_t)f->box.memory_start * f->item, f->box.strides);
}

static void tear_down(struct fixture *f) {
    free(f->payload);
    free(f->memory);
    free(f->list);
}

static void describes_the_box(void) {
    struct rng rng = {10};
    for (int i = 0; i < ROUNDS; i++) {
        struct fixture f;
        set_up(&f, &rng);
        CHECK_EQ(dr_region_bytes(&f.region), f.count * f.item);
        CHECK_INT(f.region.ndim, <=, f.box.chunk.ndim);
        if (f.count > 0)
            CHECK_EQ(f.region.first, (size_t)f.list[0].payload * f.item);
        tear_down(&f);
    }
}

/* [lo, hi) anywhere, element boundaries or not, now and then all or nothing. */
static void pick_window(struct rng *rng, const struct fixture *f, uint64_t *lo, uint64_t *hi) {
    *lo = 0;
    *hi = f->payload_bytes;
    if (rng_below(rng, 4) == 0)
        return;
    *lo = rng_below(rng, f->payload_bytes + 1);
    *hi = *lo + rng_below(rng, f->payload_bytes - *lo + 1);
    if (rng_below(rng, 2)) {
        *lo -= *lo % f->item;
        *hi -= *hi % f->item;
    }
}

static void gathers(void) {
    struct rng rng = {11};
    for (int i = 0; i < ROUNDS; i++) {
        struct fixture f;
        uint64_t lo, hi;
        set_up(&f, &rng);
        pick_window(&rng, &f, &lo, &hi);
        uint8_t *expected = check_alloc(f.payload_bytes), *buffer = check_alloc(hi - lo);
        memcpy(expected, f.payload, f.payload_bytes);
        memcpy(buffer, f.payload + lo, hi - lo);
        for (size_t e = 0; e < f.count; e++)
            memcpy(expected + (size_t)f.list[e].payload * f.item, f.memory + (size_t)f.list[e].memory * f.item, f.item);
        dr_region_gather(&f.region, lo, hi, buffer);
        CHECK_BYTES(buffer, expected + lo, hi - lo);
        free(expected);
        free(buffer);
        tear_down(&f);
    }
}

static void scatters(void) {
    struct rng rng = {12};
    for (int i = 0; i < ROUNDS; i++) {
        struct fixture f;
        uint64_t lo, hi;
        set_up(&f, &rng);
        pick_window(&rng, &f, &lo, &hi);
        uint8_t *expected = check_alloc(f.memory_bytes), *buffer = check_alloc(hi - lo);
        memcpy(expected, f.memory, f.memory_bytes);
        memcpy(buffer, f.payload + lo, hi - lo);
        for (size_t e = 0; e < f.count; e++)
            for (size_t b = 0; b < f.item; b++) {
                size_t at = (size_t)f.list[e].payload * f.item + b;
                if (at >= lo && at < hi)
                    expected[(size_t)f.list[e].memory * f.item + b] = f.payload[at];
            }
        dr_region_scatter(&f.region, lo, hi, buffer);
        CHECK_BYTES(f.memory, expected, f.memory_bytes);
        free(expected);
        free(buffer);
        tear_down(&f);
    }
}

/* Windows one behind the other, as blocks come from a file, give the same as one. */
static void scatters_piecewise(void) {
    struct rng rng = {13};
    for (int i = 0; i < ROUNDS / 4; i++) {
        struct fixture f;
        set_up(&f, &rng);
        for (uint64_t lo = 0, hi; lo < f.payload_bytes; lo = hi) {
            hi = lo + 1 + rng_below(&rng, f.payload_bytes / 3 + 1);
            if (hi > f.payload_bytes)
                hi = f.payload_bytes;
            dr_region_scatter(&f.region, lo, hi, f.payload + lo);
        }
        for (size_t e = 0; e < f.count; e++)
            CHECK_BYTES(f.memory + (size_t)f.list[e].memory * f.item, f.payload + (size_t)f.list[e].payload * f.item,
                        f.item);
        tear_down(&f);
    }
}

struct covered {
    uint8_t *bytes;
    uint64_t last, max_gap;
    unsigned count, stop_at;
};

static int cover(void *context, uint64_t lo, uint64_t hi) {
    struct covered *c = context;
    CHECK_INT(lo, <, hi);
    if (c->count++ > 0)
        CHECK_INT(lo, >=, c->last);
    if (c->count == c->stop_at)
        return -ECANCELED;
    memset(c->bytes + lo, 1, hi - lo);
    c->last = hi;
    return 0;
}

static void stretches_cover_the_box(void) {
    struct rng rng = {14};
    for (int i = 0; i < ROUNDS; i++) {
        struct fixture f;
        set_up(&f, &rng);
        struct covered c = {.bytes = check_alloc(f.payload_bytes),
                            .max_gap = rng_below(&rng, 3) * rng_below(&rng, 200)};
        uint8_t *wanted = check_alloc(f.payload_bytes);
        for (size_t e = 0; e < f.count; e++)
            memset(wanted + (size_t)f.list[e].payload * f.item, 1, f.item);
        CHECK_EQ(dr_region_stretches(&f.region, c.max_gap, cover, &c), 0);
        CHECK_EQ(c.count == 0, f.count == 0);
        /* All that is wanted, and of the rest only gaps of at most max_gap. */
        uint64_t gap = 0;
        for (size_t b = 0; b < f.payload_bytes; b++) {
            CHECK_INT(c.bytes[b], >=, wanted[b]);
            gap = c.bytes[b] && !wanted[b] ? gap + 1 : 0;
            CHECK_INT(gap, <=, c.max_gap);
        }
        free(wanted);
        free(c.bytes);
        tear_down(&f);
    }
}

/* Gaps are joined wherever they may be, so that the number of stretches is what the rule says. */
static void stretches_join_small_gaps(void) {
    const struct dr_dtype *byte = dr_dtype_by_name("uint8");
    const struct dr_shape chunk = {byte, 3, (int64_t[]){4, 10, 100}};
    const int64_t offsets[] = {0, 2, 30}, lengths[] = {4, 5, 20}, strides[] = {100, 20, 1};
    uint8_t memory[400], bytes[4000];
    struct dr_region region;
    dr_region_init(&region, &chunk, offsets, lengths, memory, strides);
    const struct {
        uint64_t max_gap;
        unsigned count;
    } expected[] = {{0, 20}, {79, 20}, {80, 4}, {579, 4}, {580, 1}, {UINT64_MAX, 1}};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        struct covered c = {.bytes = bytes};
        CHECK_EQ(dr_region_stretches(&region, expected[i].max_gap, cover, &c), 0);
        CHECK_EQ(c.count, expected[i].count);
    }
    struct covered c = {.bytes = bytes, .stop_at = 3};
    CHECK_EQ(dr_region_stretches(&region, 0, cover, &c), -ECANCELED);
    CHECK_EQ(c.count, 3);
}

/* As many axes as there may be, none of which merges with another. */
static void many_dimensions(void) {
    const struct dr_dtype *byte = dr_dtype_by_name("uint8");
    int64_t sizes[DR_MAX_DIMS], lengths[DR_MAX_DIMS], strides[DR_MAX_DIMS], stride = 1;
    for (int d = 0; d < DR_MAX_DIMS; d++) {
        bool used = d % 6 == 0;
        sizes[d] = lengths[d] = used ? 2 : 1;
        strides[d] = used ? stride : 12345;
        stride *= sizes[d];
    }
    const struct dr_shape chunk = {byte, DR_MAX_DIMS, sizes};
    uint8_t memory[2048], payload[2048];
    struct dr_region region;
    for (size_t i = 0; i < sizeof memory; i++)
        memory[i] = (uint8_t)(i * 7 + i / 256);
    dr_region_init(&region, &chunk, NULL, lengths, memory, strides);
    CHECK_EQ(dr_region_bytes(&region), stride);
    dr_region_gather(&region, 0, (uint64_t)stride, payload);
    for (int64_t i = 0; i < stride; i++) {
        int64_t reversed = 0;
        for (int64_t bit = 1; bit < stride; bit *= 2)
            reversed |= i & bit ? stride / 2 / bit : 0;
        CHECK_EQ(payload[i], memory[reversed]);
    }
}

CHECK_MAIN({"describes_the_box", describes_the_box}, {"gathers", gathers}, {"scatters", scatters},
           {"scatters_piecewise", scatters_piecewise}, {"stretches_cover_the_box", stretches_cover_the_box},
           {"stretches_join_small_gaps", stretches_join_small_gaps}, {"many_dimensions", many_dimensions})
