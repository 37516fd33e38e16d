/* Looking into records that the metadata says little about: dr_record_locate for many. See locate.h. */
#include "data/locate.h"

#include "base/memory.h"
#include "io/workers.h"

enum {
    READERS = 16,               /* threads that wait for small reads */
    STRETCH = 4 * DR_VIEW_BYTES /* records so near each other share a view */
};

struct locating {
    struct dr_input *input;
    struct dr_lookup *lookups;
    size_t *stretches; /* where each begins; one more, behind the last */
    size_t count;      /* of these */
};

static int locate_one(struct dr_view *view, const struct dr_input_file *file, struct dr_lookup *lookup,
                      struct dr_error *error) {
    if (lookup->offset > file->size || lookup->length > file->size - lookup->offset)
        return dr_error_corrupt(error, file->path, (int64_t)lookup->offset, DR_NO_ITEM,
                                "the record needs %llu bytes, the file has %llu",
                                (unsigned long long)(lookup->offset + lookup->length), (unsigned long long)file->size);
    return dr_record_locate(view, lookup->offset, lookup->length, &lookup->located, error);
}

/* Of a file that is held. The item is set at a failure. */
static int locate_all(struct locating *locating, size_t first, size_t end, int fd, struct dr_error *error) {
    const struct dr_input_file *file = &locating->input->files[locating->lookups[first].file];
    struct dr_view view;
    size_t i = first;
    int rc = dr_view_init(&view, fd, file->path, error);
    for (; i < end && rc == 0; i++)
        rc = locate_one(&view, file, &locating->lookups[i], error);
    if (rc < 0 && i > first)
        error->item = (int64_t)i - 1;
    dr_view_destroy(&view);
    return rc;
}

static int locate_stretch(void *context, size_t index, struct dr_error *error) {
    struct locating *locating = context;
    size_t first = locating->stretches[index], file = locating->lookups[first].file;
    int fd, rc = dr_input_look(locating->input, file, error);
    if (rc == 0)
        rc = dr_input_hold(locating->input, file, 1, DR_INPUT_WAIT, &fd, error);
    if (rc < 0) {
        error->item = (int64_t)first;
        return rc;
    }
    rc = locate_all(locating, first, locating->stretches[index + 1], fd, error);
    dr_input_release(locating->input, file);
    return rc;
}

static void find_stretches(struct locating *locating, size_t count) {
    const struct dr_lookup *first = NULL;
    for (size_t i = 0; i < count; i++) {
        const struct dr_lookup *lookup = &locating->lookups[i];
        if (first && lookup->file == first->file && lookup->offset >= first->offset &&
            lookup->offset - first->offset < STRETCH)
            continue;
        first = lookup;
        locating->stretches[locating->count++] = i;
    }
    locating->stretches[locating->count] = count;
}

int dr_locate(struct dr_input *input, struct dr_lookup *lookups, size_t count, const struct dr_control *control,
              struct dr_error *error) {
    struct locating locating = {.input = input, .lookups = lookups};
    locating.stretches = dr_malloc((count + 1) * sizeof *locating.stretches);
    if (!locating.stretches)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, input->dir);
    find_stretches(&locating, count);
    int rc = dr_workers_each(locating.count, READERS, locate_stretch, &locating, control, error);
    free(locating.stretches);
    return rc;
}
