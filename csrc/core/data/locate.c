/* Looking into records that the metadata says little about: dr_record_locate for many, file by file. See locate.h. */
#include "data/locate.h"

static int locate_all(struct dr_view *view, const struct dr_input_file *f, struct dr_lookup *lookups, size_t count,
                      struct dr_ticker *ticker, struct dr_error *error) {
    int rc = 0;
    for (size_t i = 0; i < count && rc == 0; i++) {
        struct dr_lookup *lookup = &lookups[i];
        if (lookup->offset > f->size || lookup->length > f->size - lookup->offset)
            rc = dr_error_corrupt(error, f->path, (int64_t)lookup->offset, (int64_t)i,
                                  "the record needs %llu bytes, the file has %llu",
                                  (unsigned long long)(lookup->offset + lookup->length), (unsigned long long)f->size);
        else
            rc = dr_record_locate(view, lookup->offset, lookup->length, &lookup->located, error);
        if (rc < 0 && error->item == DR_NO_ITEM)
            error->item = (int64_t)i;
        if (rc == 0)
            rc = dr_ticker_ask(ticker, error);
    }
    return rc;
}

static int locate_in_file(struct dr_input *input, size_t file, struct dr_lookup *lookups, size_t count,
                          struct dr_ticker *ticker, struct dr_error *error) {
    struct dr_view view;
    int fd, rc = dr_input_hold(input, file, &fd, error);
    if (rc < 0)
        return rc;
    rc = dr_view_init(&view, fd, input->files[file].path, error);
    if (rc == 0)
        rc = locate_all(&view, &input->files[file], lookups, count, ticker, error);
    dr_view_destroy(&view);
    dr_input_release(input, file);
    return rc;
}

int dr_locate(struct dr_input *input, struct dr_lookup *lookups, size_t count, const struct dr_control *control,
              struct dr_error *error) {
    struct dr_ticker ticker = {.control = control};
    int rc = 0;
    for (size_t i = 0; i < count && rc == 0; i++) {
        rc = dr_input_look(input, lookups[i].file, error);
        if (rc < 0)
            error->item = (int64_t)i;
    }
    /* Lookups come sorted by file, so each file's are one stretch. */
    for (size_t i = 0; i < count && rc == 0;) {
        size_t end = i;
        while (end < count && lookups[end].file == lookups[i].file)
            end++;
        rc = locate_in_file(input, lookups[i].file, lookups + i, end - i, &ticker, error);
        if (rc < 0 && error->item != DR_NO_ITEM)
            error->item += (int64_t)i;
        i = end;
    }
    return rc;
}
