/* Reading the zip around a record. See archive.h. */
#include "record/archive.h"

const uint8_t *dr_archive_look(const struct dr_archive *a, uint64_t offset, size_t size, uint64_t ahead) {
    if (offset > a->length || size > a->length - offset)
        return NULL;
    uint64_t until = ahead < a->length - offset ? offset + ahead : a->length;
    return dr_view_look(a->view, a->offset + offset, size, a->offset + until, a->error);
}

/* ---- the directory ---- */

static bool find_directory64(const struct dr_archive *a, uint64_t end, struct dr_directory *out) {
    const uint8_t *d = NULL;
    if (end >= DR_ZIP_LOCATOR_SIZE)
        d = dr_archive_look(a, end - DR_ZIP_LOCATOR_SIZE, DR_ZIP_LOCATOR_SIZE, 0);
    if (!d || dr_get_le(d, 4) != DR_ZIP_LOCATOR)
        return false;
    d = dr_archive_look(a, dr_get_le(d + 8, 8), DR_ZIP_END64_SIZE, 0);
    if (!d || dr_get_le(d, 4) != DR_ZIP_END64)
        return false;
    *out = (struct dr_directory){dr_get_le(d + 48, 8), dr_get_le(d + 40, 8), dr_get_le(d + 32, 8), 0, 0};
    return true;
}

bool dr_archive_open(const struct dr_archive *a, struct dr_directory *out) {
    if (a->length < DR_ZIP_END_SIZE)
        return false;
    uint64_t end = a->length - DR_ZIP_END_SIZE;
    uint64_t tail = a->length < 4096 ? 0 : a->length - 4096;
    if (!dr_archive_look(a, tail, (size_t)(a->length - tail), 0))
        return false;
    const uint8_t *d = dr_archive_look(a, end, DR_ZIP_END_SIZE, 0);
    if (!d || dr_get_le(d, 4) != DR_ZIP_END || dr_get_le(d + 20, 2) != 0)
        return false;
    *out = (struct dr_directory){dr_get_le(d + 16, 4), dr_get_le(d + 12, 4), dr_get_le(d + 10, 2), 0, 0};
    bool is_large = out->offset == DR_ZIP_LIMIT || out->size == DR_ZIP_LIMIT || out->entries == DR_ZIP_MANY;
    if (is_large && !find_directory64(a, end, out))
        return false;
    out->next = out->offset;
    out->left = out->entries;
    return out->offset <= a->length && out->size <= a->length - out->offset;
}

/* Replaces what says 0xffffffff by the values of the zip64 extra field. */
static bool apply_zip64(const uint8_t *extra, size_t size, struct dr_entry *entry) {
    uint64_t *wanted[3] = {&entry->size, &entry->packed_size, &entry->header};
    size_t need = 0;
    for (int i = 0; i < 3; i++)
        need += *wanted[i] == DR_ZIP_LIMIT ? 8 : 0;
    while (need > 0 && size >= DR_ZIP_EXTRA_SIZE) {
        size_t field = (size_t)dr_get_le(extra + 2, 2);
        if (field > size - DR_ZIP_EXTRA_SIZE)
            return false;
        if (dr_get_le(extra, 2) == DR_ZIP_EXTRA64) {
            const uint8_t *value = extra + DR_ZIP_EXTRA_SIZE;
            for (int i = 0; i < 3 && field >= need; i++)
                if (*wanted[i] == DR_ZIP_LIMIT) {
                    *wanted[i] = dr_get_le(value, 8);
                    value += 8;
                }
            return field >= need;
        }
        extra += DR_ZIP_EXTRA_SIZE + field;
        size -= DR_ZIP_EXTRA_SIZE + field;
    }
    return need == 0;
}

bool dr_archive_next(const struct dr_archive *a, struct dr_directory *dir, struct dr_entry *out) {
    uint64_t room = dir->offset + dir->size - dir->next;
    const uint8_t *d = NULL;
    if (dir->left > 0 && room >= DR_ZIP_CENTRAL_SIZE)
        d = dr_archive_look(a, dir->next, DR_ZIP_CENTRAL_SIZE, room);
    if (!d || dr_get_le(d, 4) != DR_ZIP_CENTRAL)
        return false;
    size_t name = (size_t)dr_get_le(d + 28, 2), extra = (size_t)dr_get_le(d + 30, 2);
    size_t size = DR_ZIP_CENTRAL_SIZE + name + extra + (size_t)dr_get_le(d + 32, 2);
    if (size > room || !(d = dr_archive_look(a, dir->next, size, room)))
        return false;
    *out = (struct dr_entry){.name = (const char *)d + DR_ZIP_CENTRAL_SIZE,
                             .name_size = name,
                             .header = dr_get_le(d + 42, 4),
                             .size = dr_get_le(d + 24, 4),
                             .packed_size = dr_get_le(d + 20, 4),
                             .crc = (uint32_t)dr_get_le(d + 16, 4),
                             .time = (uint32_t)dr_get_le(d + 12, 4),
                             .flags = (unsigned)dr_get_le(d + 8, 2),
                             .method = (unsigned)dr_get_le(d + 10, 2)};
    dir->next += size;
    dir->left--;
    return apply_zip64(d + DR_ZIP_CENTRAL_SIZE + name, extra, out);
}

bool dr_archive_data(const struct dr_archive *a, const struct dr_entry *entry, uint64_t *start) {
    const uint8_t *d = dr_archive_look(a, entry->header, DR_ZIP_LOCAL_SIZE, 4096);
    if (!d || dr_get_le(d, 4) != DR_ZIP_LOCAL)
        return false;
    *start = entry->header + DR_ZIP_LOCAL_SIZE + dr_get_le(d + 26, 2) + dr_get_le(d + 28, 2);
    return *start <= a->length && entry->packed_size <= a->length - *start;
}
