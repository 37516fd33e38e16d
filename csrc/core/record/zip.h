/* The numbers of zip archives, for those who write them and those who read them; docs/format.md has the fields. */
#ifndef DCPRING_ZIP_H
#define DCPRING_ZIP_H

enum {
    DR_ZIP_LOCAL = 0x04034b50, /* what each header begins with */
    DR_ZIP_DESCRIPTOR = 0x08074b50,
    DR_ZIP_CENTRAL = 0x02014b50,
    DR_ZIP_END64 = 0x06064b50,
    DR_ZIP_LOCATOR = 0x07064b50,
    DR_ZIP_END = 0x06054b50,

    DR_ZIP_LOCAL_SIZE = 30, /* bytes, without names and extra fields */
    DR_ZIP_CENTRAL_SIZE = 46,
    DR_ZIP_END64_SIZE = 56,
    DR_ZIP_LOCATOR_SIZE = 20,
    DR_ZIP_END_SIZE = 22,

    DR_ZIP_ENCRYPTED = 1, /* flags */
    DR_ZIP_SIZES_LATER = 8,

    DR_ZIP_VERSION = 20, /* of the format, that a reader must know */
    DR_ZIP_VERSION64 = 45,

    DR_ZIP_EXTRA_SIZE = 4,        /* what an extra field begins with: its id, and its length without that */
    DR_ZIP_EXTRA64 = 1,           /* ids */
    DR_ZIP_EXTRA_PADDING = 0x4246 /* torch's own: "FB" */
};

/* A size or an offset of this much, or more, is in the extra field instead; likewise a number of entries. */
#define DR_ZIP_LIMIT UINT32_MAX
#define DR_ZIP_MANY UINT16_MAX

#endif
