/* The files that are read. See input.h. */
#include "input.h"

#include "file.h"
#include "memory.h"
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

int dr_input_init(struct dr_input *input, const char *dir, const char *const *names, size_t count,
                  struct dr_error *error) {
    *input = (struct dr_input){.dirfd = DR_RETRY(dr_sys.open_dir(dir))};
    input->opened = input->dirfd >= 0;
    if (!input->opened)
        return dr_error_system(error, -input->dirfd, "open", dir);
    input->files = dr_calloc(count ? count : 1, sizeof *input->files);
    if (!input->files)
        return dr_error_system(error, ENOMEM, "malloc", dir);
    for (size_t i = 0; i < count; i++) {
        struct dr_input_file *file = &input->files[i];
        *file = (struct dr_input_file){.name = names[i], .buffered_fd = -1, .direct_fd = -1};
        file->path = dr_path_join(dir, names[i]);
        if (!file->path)
            return dr_error_system(error, ENOMEM, "malloc", dir);
        input->count = i + 1;
    }
    return 0;
}

bool dr_input_is_outside(const char *name) {
    if (name[0] == '/' || name[0] == '\0')
        return true;
    for (const char *part = name;; part++) {
        const char *end = strchr(part, '/');
        if (end ? end - part == 2 && memcmp(part, "..", 2) == 0 : strcmp(part, "..") == 0)
            return true;
        if (!end)
            return false;
        part = end;
    }
}

int dr_input_look(struct dr_input *input, size_t index, struct dr_error *error) {
    struct dr_input_file *file = &input->files[index];
    struct stat st;
    if (dr_input_is_outside(file->name))
        return dr_error_corrupt(error, file->path, -1, DR_NO_ITEM,
                                "the metadata names a file outside of the checkpoint directory");
    /* O_NONBLOCK: a FIFO in the file's place is refused below, not waited for. */
    int fd = DR_RETRY(dr_sys.open_below(input->dirfd, file->name, O_RDONLY | O_NONBLOCK, 0));
    if (fd < 0)
        return dr_error_system(error, -fd, "open", file->path);
    int rc = DR_RETRY(dr_sys.fstat(fd, &st));
    dr_sys.close(fd);
    if (rc < 0)
        return dr_error_system(error, -rc, "fstat", file->path);
    if (!S_ISREG(st.st_mode))
        return dr_error_corrupt(error, file->path, -1, DR_NO_ITEM, "not a regular file");
    file->size = (uint64_t)st.st_size;
    return 0;
}

int dr_input_open(const struct dr_input *input, const struct dr_input_file *file, int *fd, struct dr_error *error) {
    int rc = DR_RETRY(dr_sys.open_below(input->dirfd, file->name, 0, 0));
    if (rc < 0)
        return dr_error_system(error, -rc, "open", file->path);
    *fd = rc;
    return 0;
}

void dr_input_close(struct dr_input_file *file) {
    if (file->buffered_fd >= 0)
        dr_sys.close(file->buffered_fd);
    if (file->direct_fd >= 0)
        dr_sys.close(file->direct_fd);
    file->buffered_fd = file->direct_fd = -1;
}

void dr_input_destroy(struct dr_input *input) {
    for (size_t i = 0; i < input->count; i++) {
        dr_input_close(&input->files[i]);
        free(input->files[i].path);
    }
    free(input->files);
    if (input->opened)
        dr_sys.close(input->dirfd);
    *input = (struct dr_input){0};
}
