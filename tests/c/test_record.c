/*
 * Records: what the encoder makes, and that the decoder finds it again.
 *
 * A payload's bytes do not matter to either, so the file is made of head and
 * tail only, with a hole of any size between them.
 */
#include "base/align.h"
#include "base/crc.h"
#include "check.h"
#include "io/sys.h"
#include "record/record.h"

/* ---- a file with a hole ---- */

static struct {
    uint64_t size;
    struct {
        uint64_t offset;
        size_t size;
        const uint8_t *data;
    } parts[2];
    unsigned reads, fail_at; /* the read that fails, from 1 */
    size_t longest;          /* bytes that one read gives at most */
} holed;

static ssize_t holed_pread(int fd, void *data, size_t size, off_t offset) {
    (void)fd;
    uint8_t *out = data;
    uint64_t at = (uint64_t)offset;
    if (++holed.reads == holed.fail_at)
        return -EIO;
    if (at >= holed.size)
        return 0;
    if (size > holed.size - at)
        size = holed.size - at;
    if (size > holed.longest)
        size = holed.longest;
    memset(out, 0, size);
    for (int i = 0; i < 2; i++) {
        uint64_t lo = holed.parts[i].offset, hi = lo + holed.parts[i].size;
        for (uint64_t b = at > lo ? at : lo; b < hi && b < at + size; b++)
            out[b - at] = holed.parts[i].data[b - lo];
    }
    return (ssize_t)size;
}

struct record {
    uint8_t head[DR_RECORD_HEAD_MAX], tail[DR_RECORD_TAIL_MAX];
    size_t head_size, tail_size;
    uint64_t offset, payload, length;
};

static void encode(struct record *r, const struct dr_shape *shape, uint64_t offset, uint32_t crc) {
    r->offset = offset;
    CHECK(dr_shape_bytes(shape, &r->payload));
    r->head_size = dr_record_head(shape, offset, r->head);
    r->tail_size = dr_record_tail(shape, offset, r->head_size, crc, r->tail);
    r->length = r->head_size + r->payload + r->tail_size;
    CHECK_INT(r->head_size, <=, DR_RECORD_HEAD_MAX);
    CHECK_INT(r->tail_size, <=, DR_RECORD_TAIL_MAX);
    CHECK_EQ(dr_record_tail_size(shape, r->head_size), r->tail_size);
    uint64_t alignment = r->payload >= DR_LARGE_PAYLOAD ? DR_ALIGNMENT : DR_SMALL_ALIGNMENT;
    CHECK_EQ((offset + r->head_size) % alignment, 0);
}

static void put_in_file(const struct record *r) {
    holed.size = r->offset + r->length;
    holed.parts[0].offset = r->offset;
    holed.parts[0].size = r->head_size;
    holed.parts[0].data = r->head;
    holed.parts[1].offset = r->offset + r->head_size + r->payload;
    holed.parts[1].size = r->tail_size;
    holed.parts[1].data = r->tail;
    holed.reads = 0;
    holed.fail_at = 0;
    holed.longest = SIZE_MAX;
    dr_sys.pread = holed_pread;
}

static int locate(uint64_t offset, uint64_t length, struct dr_located *located, struct dr_error *error) {
    struct dr_view view;
    dr_error_clear(error);
    CHECK_OK(dr_view_init(&view, -1, "memory", error), error);
    memset(located, 0xa5, sizeof *located);
    int rc = dr_record_locate(&view, offset, length, located, error);
    dr_view_destroy(&view);
    dr_sys.pread = dr_sys_real.pread;
    return rc;
}

/* Encodes, and checks that decoding gives the same. */
static void round_trip(const struct dr_shape *shape, uint64_t offset) {
    struct record r;
    struct dr_located located;
    struct dr_error error;
    encode(&r, shape, offset, 0x89abcdef);
    put_in_file(&r);
    CHECK_OK(locate(offset, r.length, &located, &error), &error);
    CHECK(located.plain);
    CHECK_EQ(located.payload_offset, offset + r.head_size);
    CHECK_EQ(located.payload_size, r.payload);
    CHECK_EQ(located.crc, 0x89abcdef);
    CHECK(located.dtype == shape->dtype);
    CHECK_EQ(located.ndim, shape->ndim);
    for (int d = 0; d < shape->ndim; d++)
        CHECK_EQ(located.sizes[d], shape->sizes[d]);
}

/* ---- objects ---- */

/* An archive around a pickle: its entries lie where its directory says, and the pickle is the first. */
static void object_round_trip(uint64_t size) {
    struct record r = {.payload = size};
    r.head_size = dr_object_head(size, 0x89abcdef, r.head);
    r.tail_size = dr_object_tail(size, 0x89abcdef, r.tail);
    r.length = r.head_size + size + r.tail_size;
    put_in_file(&r);
    struct dr_view view;
    struct dr_error error;
    dr_error_clear(&error);
    CHECK_OK(dr_view_init(&view, -1, "memory", &error), &error);
    const struct dr_archive archive = {&view, 0, r.length, &error};
    struct dr_directory directory;
    struct dr_entry entry;
    uint64_t start;
    CHECK(dr_archive_open(&archive, &directory));
    CHECK_EQ(directory.entries, 3);
    for (int i = 0; i < 3; i++) {
        CHECK(dr_archive_next(&archive, &directory, &entry) && dr_archive_data(&archive, &entry, &start));
        CHECK_EQ(entry.size, i == 0 ? size : i == 1 ? 6 : 2);
        CHECK_EQ(entry.packed_size, entry.size);
        if (i == 0)
            CHECK_EQ(start, r.head_size);
        if (i == 0)
            CHECK_EQ(entry.crc, 0x89abcdef);
    }
    CHECK_EQ(directory.next, directory.offset + directory.size);
    dr_view_destroy(&view);
    dr_sys.pread = dr_sys_real.pread;
}

static void objects(void) {
    for (uint64_t size = 0; size < 300; size++)
        object_round_trip(size);
    for (uint64_t size = DR_ZIP_LIMIT - 200ull; size < DR_ZIP_LIMIT + 3ull; size++)
        object_round_trip(size);
    object_round_trip((uint64_t)5 << 40);
}

/* ---- cases ---- */

static void every_dtype(void) {
    const int64_t sizes[] = {3, 5, 7};
    for (const struct dr_dtype *dtype = dr_dtypes; dtype->name; dtype++) {
        CHECK(dr_dtype_by_name(dtype->name) == dtype);
        if (dtype->storage)
            CHECK(dr_dtype_by_storage(dtype->storage) == dtype);
        for (int ndim = 0; ndim <= 3; ndim++)
            round_trip(&(struct dr_shape){dtype, ndim, sizes}, 0);
    }
    CHECK(!dr_dtype_by_name("float31") && !dr_dtype_by_storage("FloaterStorage") && !dr_dtype_by_storage(""));
}

static void every_number_of_dimensions(void) {
    struct rng rng = {4};
    for (int ndim = 0; ndim <= DR_MAX_DIMS; ndim++) {
        int64_t sizes[DR_MAX_DIMS];
        for (int d = 0; d < ndim; d++)
            sizes[d] = rng_below(&rng, 8) == 0 ? 2 : 1;
        round_trip(&(struct dr_shape){dr_dtype_by_name("bfloat16"), ndim, sizes}, rng_below(&rng, 1 << 20));
        for (int d = 0; d < ndim; d++)
            sizes[d] = (int64_t)rng_below(&rng, 3);
        uint64_t bytes;
        struct dr_shape shape = {dr_dtype_by_name("uint16"), ndim, sizes};
        if (dr_shape_bytes(&shape, &bytes))
            round_trip(&shape, rng_below(&rng, 1 << 20));
    }
}

/* The longest pickle: 64 dimensions, each size and stride in eight bytes or nearly. */
static void longest_head(void) {
    int64_t sizes[DR_MAX_DIMS];
    for (int d = 0; d < DR_MAX_DIMS; d++)
        sizes[d] = d == DR_MAX_DIMS - 1 ? (int64_t)1 << 50 : 1;
    const struct dr_shape shape = {dr_dtype_by_name("float4_e2m1fn_x2"), DR_MAX_DIMS, sizes};
    for (uint64_t offset = 0; offset < 4200; offset += 7)
        round_trip(&shape, offset);
}

/* Every residue of the alignment, so that every length of padding is made; 1 to 3 bytes cannot be expressed. */
static void alignment_of_payload(void) {
    for (uint64_t offset = 0; offset < 200; offset++)
        round_trip(&(struct dr_shape){dr_dtype_by_name("float32"), 1, (int64_t[]){1000}}, offset);
    for (uint64_t offset = 0; offset < 4200; offset++) {
        struct record r;
        encode(&r, &(struct dr_shape){dr_dtype_by_name("float32"), 1, (int64_t[]){1 << 18}}, offset, 1);
    }
    for (int64_t size = (1 << 20) - 2; size <= (1 << 20) + 2; size++)
        round_trip(&(struct dr_shape){dr_dtype_by_name("uint8"), 1, &size}, 12345);
}

static void sizes_around_4_gib(void) {
    const int64_t limit = 0xffffffff;
    const struct dr_dtype *byte = dr_dtype_by_name("uint8");
    /* Around where the payload needs zip64, and, a head and a tail earlier, where only the directory's offset does. */
    for (int64_t size = limit - 3; size <= limit + 3; size++)
        round_trip(&(struct dr_shape){byte, 1, &size}, 4096);
    unsigned lengths[2] = {0, 0};
    for (int64_t size = limit - 5000; size < limit; size += 1) {
        struct record r;
        encode(&r, &(struct dr_shape){byte, 1, &size}, 0, 1);
        lengths[r.head_size + r.payload + 16 >= (uint64_t)limit]++;
        if (size % 500 == 0 || r.head_size + r.payload + 16 - (uint64_t)limit + 2 < 5)
            round_trip(&(struct dr_shape){byte, 1, &size}, 0);
    }
    CHECK(lengths[0] > 0 && lengths[1] > 0);
    for (int bits = 33; bits < 62; bits += 4)
        round_trip(&(struct dr_shape){byte, 2, (int64_t[]){2, ((int64_t)1 << (bits - 1)) + 1}}, (uint64_t)5 << 32);
    round_trip(&(struct dr_shape){dr_dtype_by_name("float64"), 3, (int64_t[]){1 << 20, 1, 1 << 13}},
               ((uint64_t)1 << 40) + 11);
}

static void empty_and_scalar(void) {
    const struct dr_dtype *f = dr_dtype_by_name("float32");
    round_trip(&(struct dr_shape){f, 0, NULL}, 0);
    round_trip(&(struct dr_shape){f, 1, (int64_t[]){0}}, 17);
    round_trip(&(struct dr_shape){f, 3, (int64_t[]){4, 0, 5}}, 1000);
    round_trip(&(struct dr_shape){f, 1, (int64_t[]){1}}, 63);
    uint64_t bytes = 1;
    CHECK(dr_shape_bytes(&(struct dr_shape){f, 0, NULL}, &bytes));
    CHECK_EQ(bytes, 4);
}

static void impossible_shapes(void) {
    const struct dr_dtype *c = dr_dtype_by_name("complex128");
    uint64_t bytes;
    CHECK(!dr_shape_bytes(&(struct dr_shape){c, 1, (int64_t[]){-1}}, &bytes));
    CHECK(!dr_shape_bytes(&(struct dr_shape){c, 1, (int64_t[]){INT64_MAX}}, &bytes));
    CHECK(!dr_shape_bytes(&(struct dr_shape){c, 1, (int64_t[]){INT64_MAX / 16 + 1}}, &bytes));
    CHECK(!dr_shape_bytes(&(struct dr_shape){c, 3, (int64_t[]){(int64_t)1 << 32, (int64_t)1 << 32, 16}}, &bytes));
    CHECK(!dr_shape_bytes(&(struct dr_shape){c, 2, (int64_t[]){0, -5}}, &bytes));
    CHECK(dr_shape_bytes(&(struct dr_shape){c, 1, (int64_t[]){INT64_MAX / 16}}, &bytes));
}

/* The CRC in the tail is the only thing that depends on the payload. */
static void crc_is_in_the_tail(void) {
    struct record a, b;
    const struct dr_shape shape = {dr_dtype_by_name("int64"), 2, (int64_t[]){100, 3}};
    encode(&a, &shape, 77, 0);
    encode(&b, &shape, 77, 0xffffffff);
    CHECK_EQ(a.head_size, b.head_size);
    CHECK_BYTES(a.head, b.head, a.head_size);
    CHECK_EQ(a.tail_size, b.tail_size);
    unsigned different = 0;
    for (size_t i = 0; i < a.tail_size; i++)
        different += a.tail[i] != b.tail[i];
    CHECK_EQ(different, 8); /* the descriptor and the directory */
}

/* A file that ends early is an error, or not plain; never a tensor. */
static void truncated(void) {
    struct record r;
    struct dr_located located;
    struct dr_error error;
    encode(&r, &(struct dr_shape){dr_dtype_by_name("float16"), 2, (int64_t[]){6, 9}}, 300, 5);
    for (uint64_t length = 0; length < r.length; length++) {
        put_in_file(&r);
        CHECK_OK(locate(300, length, &located, &error), &error);
        CHECK(!located.plain);
    }
    for (uint64_t size = 0; size < 300 + r.length; size++) {
        put_in_file(&r);
        holed.size = size;
        int rc = locate(300, r.length, &located, &error);
        CHECK(!located.plain);
        CHECK_EQ(rc, -EBADMSG);
        CHECK_EQ(error.kind, DR_ERROR_CORRUPT);
    }
}

static void short_and_failing_reads(void) {
    struct record r;
    struct dr_located located;
    struct dr_error error;
    encode(&r, &(struct dr_shape){dr_dtype_by_name("float16"), 2, (int64_t[]){600, 900}}, 4000, 5);
    put_in_file(&r);
    holed.longest = 1;
    CHECK_OK(locate(4000, r.length, &located, &error), &error);
    CHECK(located.plain);
    put_in_file(&r);
    CHECK_OK(locate(4000, r.length, &located, &error), &error);
    CHECK(located.plain);
    unsigned reads = holed.reads;
    CHECK_INT(reads, <=, 3);
    for (unsigned n = 1; n <= reads; n++) {
        put_in_file(&r);
        holed.fail_at = n;
        CHECK_FAILS(locate(4000, r.length, &located, &error), &error, EIO);
        CHECK(!located.plain);
        CHECK(strcmp(error.path, "memory") == 0);
    }
}

/* What was changed may still be a record, but then one whose payload lies in it and fits its shape. */
static void check_sound(const struct dr_located *located, uint64_t offset, uint64_t length) {
    uint64_t bytes;
    if (!located->plain)
        return;
    CHECK(located->dtype);
    CHECK_INT(located->ndim, >=, 0);
    CHECK_INT(located->ndim, <=, DR_MAX_DIMS);
    CHECK_INT(located->payload_offset, >=, offset);
    CHECK_INT(located->payload_offset + located->payload_size, <=, offset + length);
    CHECK(dr_shape_bytes(&(struct dr_shape){located->dtype, located->ndim, located->sizes}, &bytes));
    CHECK_EQ(bytes, located->payload_size);
}

static void mutated(void) {
    struct rng rng = {6};
    struct dr_located located;
    struct dr_error error;
    for (int i = 0; i < 40000; i++) {
        struct record r;
        const int64_t sizes[] = {rng_below(&rng, 8) ? 3 : (int64_t)1 << 33, (int64_t)rng_below(&rng, 20)};
        const struct dr_dtype *dtype = dr_dtype_by_name(i % 2 ? "float32" : "uint32");
        uint64_t offset = rng_below(&rng, 5000);
        encode(&r, &(struct dr_shape){dtype, (int)rng_below(&rng, 3), sizes}, offset, 5);
        for (uint64_t n = rng_below(&rng, 4) + 1; n > 0; n--) {
            uint8_t value = (uint8_t)(rng_below(&rng, 3) ? rng_next(&rng) : rng_below(&rng, 2) ? 0xff : 0);
            if (rng_below(&rng, 2))
                r.tail[rng_below(&rng, r.tail_size)] = value;
            else
                r.head[rng_below(&rng, r.head_size)] = value;
        }
        put_in_file(&r);
        int rc = locate(offset, r.length, &located, &error);
        CHECK(rc == 0 || rc == -EBADMSG);
        CHECK(rc == 0 || !located.plain);
        check_sound(&located, offset, r.length);
    }
}

/* One long view is read for records that lie near each other: two reads for each would be one too many. */
static void view_is_reused(void) {
    struct dr_view view;
    struct dr_located located;
    struct dr_error error;
    struct record r;
    enum { COUNT = 50 };
    static uint8_t file[COUNT * 2048];
    uint64_t offsets[COUNT + 1] = {0};
    for (int i = 0; i < COUNT; i++) {
        encode(&r, &(struct dr_shape){dr_dtype_by_name("int8"), 1, (int64_t[]){i}}, offsets[i], (uint32_t)i);
        memcpy(file + offsets[i], r.head, r.head_size);
        memcpy(file + offsets[i] + r.head_size + r.payload, r.tail, r.tail_size);
        offsets[i + 1] = offsets[i] + r.length;
        CHECK_INT(offsets[i + 1], <=, sizeof file);
    }
    put_in_file(&r);
    holed.size = offsets[COUNT];
    holed.parts[0].offset = 0;
    holed.parts[0].size = offsets[COUNT];
    holed.parts[0].data = file;
    holed.parts[1].size = 0;
    dr_error_clear(&error);
    CHECK_OK(dr_view_init(&view, -1, "memory", &error), &error);
    for (int i = 0; i < COUNT; i++) {
        CHECK_OK(dr_record_locate(&view, offsets[i], offsets[i + 1] - offsets[i], &located, &error), &error);
        CHECK(located.plain);
        CHECK_EQ(located.crc, i);
        CHECK_EQ(located.payload_size, i);
    }
    dr_view_destroy(&view);
    dr_sys.pread = dr_sys_real.pread;
}

CHECK_MAIN({"objects", objects}, {"every_dtype", every_dtype},
           {"every_number_of_dimensions", every_number_of_dimensions}, {"longest_head", longest_head},
           {"alignment_of_payload", alignment_of_payload}, {"sizes_around_4_gib", sizes_around_4_gib},
           {"empty_and_scalar", empty_and_scalar}, {"impossible_shapes", impossible_shapes},
           {"crc_is_in_the_tail", crc_is_in_the_tail}, {"truncated", truncated},
           {"short_and_failing_reads", short_and_failing_reads}, {"mutated", mutated},
           {"view_is_reused", view_is_reused})
