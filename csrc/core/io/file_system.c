/* What kind of file system a path lies on. See file_system.h. */
#include "io/file_system.h"

#include "base/memory.h"
#include "io/sys.h"

#include <errno.h>
#include <string.h>

int dr_file_system(const char *path, uint64_t *out, struct dr_error *error) {
    char *at = dr_strdup(path);
    if (!at)
        return dr_error_memory(error);
    struct statfs about = {0};
    int rc = DR_RETRY(dr_sys.statfs(at, &about));
    while (rc == -ENOENT) {
        char *slash = strrchr(at, '/');
        if (!slash || slash == at) {
            rc = DR_RETRY(dr_sys.statfs(slash ? "/" : ".", &about));
            break;
        }
        *slash = 0;
        rc = DR_RETRY(dr_sys.statfs(at, &about));
    }
    free(at);
    *out = (uint64_t)about.f_type & UINT32_MAX;
    return rc < 0 ? dr_error_system(error, -rc, DR_CALL_STATFS, path) : 0;
}

bool dr_file_system_is(const char *path, uint64_t magic) {
    DR_NEW_ERROR(ignored);
    uint64_t found;
    return dr_file_system(path, &found, &ignored) == 0 && found == magic;
}
