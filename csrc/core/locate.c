/* Looking into records that the metadata says little about: dr_record_locate for many, file by file. See load.h. */
#include "load_plan.h"

static int locate_in_file(struct dr_load_plan *plan, size_t file, struct dr_lookup *lookups, size_t count,
                          const struct dr_control *control, struct dr_error *error) {
    struct dr_window window = {0};
    struct dr_load_file *f = &plan->files[file];
    int rc = dr_load_file_open(plan, f, &f->buffered_fd, error);
    if (rc == 0)
        rc = dr_window_init(&window, f->buffered_fd, f->path, error);
    for (size_t i = 0; i < count && rc == 0; i++) {
        struct dr_lookup *lookup = &lookups[i];
        if (lookup->offset > f->size || lookup->length > f->size - lookup->offset)
            rc = dr_error_corrupt(error, f->path, (int64_t)lookup->offset, (int64_t)i,
                                  "the record needs %llu bytes, the file has %llu",
                                  (unsigned long long)(lookup->offset + lookup->length), (unsigned long long)f->size);
        else
            rc = dr_record_locate(&window, lookup->offset, lookup->length, &lookup->located, error);
        if (rc < 0 && error->item == DR_NO_ITEM)
            error->item = (int64_t)i;
        if (rc == 0 && i % 1024 == 1023 && control->poll && control->poll(control->context))
            rc = dr_error_cancelled(error);
    }
    dr_window_destroy(&window);
    dr_load_file_close(f);
    return rc;
}

int dr_locate(const char *dir, const char *const *names, size_t name_count, struct dr_lookup *lookups, size_t count,
              const struct dr_control *control, struct dr_error *error) {
    struct dr_load_plan plan = {0};
    int rc = dr_load_plan_open_files(&plan, dir, names, name_count, error);
    for (size_t i = 0; rc < 0 && i < count && error->item == DR_NO_ITEM; i++)
        if (lookups[i].file + 1 == plan.file_count)
            error->item = (int64_t)i;
    /* Lookups come sorted by file, so each file's are one stretch. */
    for (size_t i = 0; i < count && rc == 0;) {
        size_t end = i;
        while (end < count && lookups[end].file == lookups[i].file)
            end++;
        rc = locate_in_file(&plan, lookups[i].file, lookups + i, end - i, control, error);
        if (rc < 0 && error->item != DR_NO_ITEM)
            error->item += (int64_t)i;
        i = end;
    }
    dr_load_plan_destroy(&plan);
    return rc;
}
