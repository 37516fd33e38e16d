/*
 * Random tensors and byte strings, kept with what must be in the file and what
 * must come back: the oracle for tests of saving and loading.
 */
#ifndef DCPRING_SAMPLE_H
#define DCPRING_SAMPLE_H

#include "check.h"
#include "data/load.h"
#include "data/locate.h"
#include "data/save.h"

enum { SAMPLE_MAX_NDIM = 5 };

struct sample {
    struct dr_source source; /* points into this struct, which therefore stays where it is */
    int64_t sizes[SAMPLE_MAX_NDIM], strides[SAMPLE_MAX_NDIM];
    uint8_t *memory;   /* what the source's data points into */
    uint8_t *payload;  /* the elements in row-major order */
    size_t part_bytes; /* handed over in parts of this size; 0: whole */
    struct dr_placed placed;
    uint8_t *crcs; /* as they are stored, little-endian */
};

/* Whether io_uring can be had here. */
bool sample_has_uring(void);

void sample_tensor(struct sample *sample, struct rng *rng, uint64_t max_bytes, bool strided);
void sample_bytes(struct sample *sample, struct rng *rng, uint64_t size);
/* A contiguous tensor of just this shape. */
void sample_shape(struct sample *sample, struct rng *rng, const char *dtype, int ndim, const int64_t *sizes);
void sample_free(struct sample *samples, size_t count);

/*
 * Writes the samples as check_dir/name, `window` a call, and closes the
 * writer; where they lie is noted in them.
 */
int sample_save(const char *name, struct sample *samples, size_t count, size_t window, uint64_t size_hint,
                const struct dr_options *options, const struct dr_control *control, struct dr_writer_stats *stats,
                struct dr_error *error);

/* The file check_dir/name is, byte for byte, what these samples make. */
void sample_check_file(const char *name, const struct sample *samples, size_t count, bool checksum);

/* Where one read goes, and what must be there afterwards. */
struct target {
    int64_t offsets[SAMPLE_MAX_NDIM], lengths[SAMPLE_MAX_NDIM], strides[SAMPLE_MAX_NDIM];
    uint8_t *memory, *expected;
    size_t size;   /* bytes of memory */
    size_t needed; /* bytes of the slice */
};

enum target_slice { SLICE_WHOLE, SLICE_RANDOM };

/* A read of a sample, or a random slice of it, into memory that is contiguous or strided. */
void target_init(struct target *target, struct dr_read *read, const struct sample *sample, size_t file, struct rng *rng,
                 enum target_slice slice, bool strided);
/* The same for a slice that the caller has set in target->offsets and ->lengths. */
void target_finish(struct target *target, struct dr_read *read, const struct sample *sample, size_t file,
                   struct rng *rng, bool strided);
/* The memory holds the slice, and nothing else was written to. */
void target_check(const struct target *target);
bool target_is_untouched(const struct target *target);
void target_free(struct target *targets, size_t count);

/* dr_load and dr_locate of files of check_dir, which are opened for that alone. */
int sample_dr_load(const char *const *names, size_t name_count, struct dr_read *reads, size_t count,
                   const struct dr_options *options, const struct dr_control *control, struct dr_stream_stats *stats,
                   struct dr_error *error);
int sample_dr_locate(const char *const *names, size_t name_count, struct dr_lookup *lookups, size_t count,
                     const struct dr_control *control, struct dr_error *error);

/* Everything loaded whole from check_dir/name; right, or an error. */
int sample_load_all(const char *name, const struct sample *samples, size_t count, const struct dr_options *options,
                    const struct dr_control *control, struct dr_stream_stats *stats, struct dr_error *error);

#endif
