/* Tensors copied from memory to memory. See copy.h. */
#include "data/copy.h"

#include "base/align.h"
#include "base/memory.h"
#include "base/sort.h"
#include "io/workers.h"

#include <assert.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* STREAM_BYTES: so much does not stay in a processor's cache until it is read again, and is written past it. */
enum { LINE = 64, STREAM_BYTES = 8 << 20 };

/*
 * One call. The list is a stream of bytes, in which each entry begins at a multiple of LINE, so that every piece begins
 * at one in memory, too, where the entry does. The workers take the next piece each.
 */
struct copying {
    const struct dr_copy *copies;
    size_t count;
    uint64_t *starts; /* of each entry in the stream, and its end */
    bool streams;
    struct dr_workers workers;
};

/*
 * Writes past the cache, which saves reading the lines that are overwritten: a third of the traffic of a copy.
 * memcpy does so only for single copies that are far larger.
 */
static void copy_bytes(uint8_t *to, const uint8_t *from, size_t size, bool streams) {
#ifdef __SSE2__
    if (streams && (uintptr_t)to % sizeof(__m128i) == 0) {
        for (; size >= LINE; size -= LINE, from += LINE, to += LINE) {
            const __m128i *in = (const __m128i *)(const void *)from;
            __m128i *out = (__m128i *)(void *)to;
            _mm_prefetch((const char *)(from + 16 * LINE), _MM_HINT_NTA);
            __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
            __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
            _mm_stream_si128(out, a);
            _mm_stream_si128(out + 1, b);
            _mm_stream_si128(out + 2, c);
            _mm_stream_si128(out + 3, d);
        }
        _mm_sfence();
    }
#else
    (void)streams;
#endif
    memcpy(to, from, size);
}

/* Bytes [lo, hi) of one entry. */
static void copy_part(const struct dr_copy *copy, uint64_t lo, uint64_t hi, bool streams) {
    uint8_t *to = (uint8_t *)copy->to + lo;
    if (copy->region)
        dr_region_gather(copy->region, lo, hi, to);
    else
        copy_bytes(to, (const uint8_t *)copy->from + lo, (size_t)(hi - lo), streams);
}

/* What lies in [lo, hi) of the stream. */
static void copy_piece(const struct copying *copying, uint64_t lo, uint64_t hi) {
    size_t i = dr_stretch_at(copying->starts, copying->count, lo);
    for (; i < copying->count && copying->starts[i] < hi; i++) {
        uint64_t start = copying->starts[i], bytes = copying->copies[i].bytes;
        uint64_t first = lo > start ? lo - start : 0;
        uint64_t last = hi - start < bytes ? hi - start : bytes;
        if (first < last)
            copy_part(&copying->copies[i], first, last, copying->streams);
    }
}

static int work(void *context, unsigned index, struct dr_error *error) {
    struct copying *copying = context;
    (void)index, (void)error;
    for (size_t piece; dr_workers_take(&copying->workers, &piece);)
        copy_piece(copying, piece * DR_COPY_PIECE, (piece + 1) * DR_COPY_PIECE);
    return 0;
}

int dr_copy_all(const struct dr_copy *copies, size_t count, unsigned workers, const struct dr_control *control,
                struct dr_error *error) {
    struct copying copying = {.copies = copies, .count = count, .starts = dr_malloc((count + 1) * sizeof(uint64_t))};
    if (!copying.starts)
        return dr_error_memory(error);
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        copying.starts[i] = total;
        total += dr_align_up(copies[i].bytes, LINE);
    }
    copying.starts[count] = total;
    copying.streams = total >= STREAM_BYTES;
    int rc = 0;
    if (total > DR_COPY_PIECE)
        rc = dr_workers_share(&copying.workers, (size_t)((total + DR_COPY_PIECE - 1) / DR_COPY_PIECE), workers, work,
                              &copying, control, error);
    else if (total > 0)
        copy_piece(&copying, 0, total); /* a thread would cost more */
    free(copying.starts);
    return rc;
}
