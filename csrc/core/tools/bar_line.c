/*
 * What a progress bar looks like: from numbers to a line, for any width.
 *
 * Numbers are written without printf's floating point: that follows the
 * program's locale. Everything goes through a `text`, which counts columns and
 * never writes past its room.
 */
#include "tools/bar.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { DEFAULT_COLUMNS = 80, WIDEST_BAR = 40, NARROWEST_BAR = 8, FIELD = 48 };

/* ---- text ---- */

struct text {
    char *data;
    size_t size, room; /* room for the end of the string is kept */
    int columns;       /* that it takes on the terminal */
};

static struct text text_in(char *data, size_t room) {
    data[0] = '\0';
    return (struct text){.data = data, .room = room};
}

/* Bytes that take `columns` on the terminal: all of them or none. */
static void put(struct text *text, const char *bytes, size_t size, int columns) {
    if (size >= text->room - text->size)
        return;
    memcpy(text->data + text->size, bytes, size);
    text->size += size;
    text->data[text->size] = '\0';
    text->columns += columns;
}

static void put_ascii(struct text *text, const char *string) {
    size_t size = strlen(string);
    put(text, string, size, (int)size);
}

/* An escape or one character of the bar. */
static void put_sign(struct text *text, const char *string, int columns) { put(text, string, strlen(string), columns); }

/* A label: a column for each character, of which none steers the terminal. Where it has no room, it is cut. */
static void put_label(struct text *text, const char *label, int columns) {
    while (*label && columns-- > 0) {
        size_t size = 1;
        while (((unsigned char)label[size] & 0xc0) == 0x80)
            size++;
        bool plain = (unsigned char)label[0] >= 0x20 && label[0] != 0x7f;
        put(text, plain ? label : "?", plain ? size : 1, 1);
        label += size;
    }
}

/* ---- numbers ---- */

static const char *const BINARY[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
static const char *const DECIMAL[] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s", "EB/s"};

static int binary_unit(uint64_t bytes) {
    int unit = 0;
    while (bytes >> 10 * unit >= 1024)
        unit++;
    return unit;
}

/* With one decimal, rounded down: what is not all there must not look so. */
static void put_bytes(struct text *text, uint64_t bytes, int unit) {
    char digits[FIELD];
    uint64_t whole = bytes >> 10 * unit;
    if (unit == 0) {
        snprintf(digits, sizeof digits, "%" PRIu64, whole);
    } else {
        uint64_t part = (bytes >> 10 * (unit - 1) & 1023) * 10 / 1024;
        snprintf(digits, sizeof digits, "%" PRIu64 ".%" PRIu64, whole, part);
    }
    put_ascii(text, digits);
}

uint64_t dr_bar_rate(uint64_t bytes, uint64_t ms) {
    double rate = (double)bytes * 1000 / (double)ms;
    return rate < 0x1p64 ? (uint64_t)rate : UINT64_MAX;
}

/* "1.25 GB/s": three digits. */
static void put_rate(struct text *text, uint64_t rate) {
    char digits[FIELD];
    uint64_t step = 1;
    int unit = 0;
    while (rate / step >= 1000) {
        step *= 1000;
        unit++;
    }
    uint64_t whole = rate / step, thousandths = step == 1 ? 0 : rate % step / (step / 1000);
    if (unit == 0 || whole >= 100)
        snprintf(digits, sizeof digits, "%" PRIu64 " %s", whole, DECIMAL[unit]);
    else if (whole >= 10)
        snprintf(digits, sizeof digits, "%" PRIu64 ".%" PRIu64 " %s", whole, thousandths / 100, DECIMAL[unit]);
    else
        snprintf(digits, sizeof digits, "%" PRIu64 ".%02" PRIu64 " %s", whole, thousandths / 10, DECIMAL[unit]);
    put_ascii(text, digits);
}

/* "2:05", "1:02:05". */
static void put_clock(struct text *text, uint64_t s) {
    char digits[FIELD];
    if (s < 3600)
        snprintf(digits, sizeof digits, "%" PRIu64 ":%02" PRIu64, s / 60, s % 60);
    else
        snprintf(digits, sizeof digits, "%" PRIu64 ":%02" PRIu64 ":%02" PRIu64, s / 3600, s / 60 % 60, s % 60);
    put_ascii(text, digits);
}

/* "3.2 s", and from a minute on as a clock. */
static void put_duration(struct text *text, uint64_t ms) {
    char digits[FIELD];
    if (ms >= 60000) {
        put_clock(text, ms / 1000);
        return;
    }
    snprintf(digits, sizeof digits, "%" PRIu64 ".%" PRIu64 " s", ms / 1000, ms % 1000 / 100);
    put_ascii(text, digits);
}

/* "0:07 left". */
static void put_left(struct text *text, const struct dr_bar_view *view) {
    uint64_t left = view->total - view->done;
    uint64_t s = view->rate ? left / view->rate + (left % view->rate > 0) : UINT64_MAX;
    if (s < 100 * 3600)
        put_clock(text, s);
    else
        put_ascii(text, "-:--");
    put_ascii(text, " left");
}

/* done * steps / total, for steps below 1024: all of them only when all is done. */
static uint64_t share(const struct dr_bar_view *view, uint64_t steps) {
    uint64_t done = view->done, total = view->total;
    while (total >> 53) {
        done >>= 1;
        total >>= 1;
    }
    uint64_t part = total ? done * steps / total : 0;
    return part == steps && view->done < view->total ? steps - 1 : part;
}

/* ---- the bar ---- */

struct style {
    const char *open, *close, *full, *empty;
    const char *part[8]; /* of a cell, as many as there are `steps` - 1 */
    uint64_t steps;
    const char *full_colour, *empty_colour, *no_colour;
};

static const struct style ASCII = {"[", "]", "#", "-", {NULL}, 1, "", "", ""};
static const struct style ASCII_COLOUR = {"[", "]", "#", "-", {NULL}, 1, "\x1b[36m", "\x1b[2m", "\x1b[0m"};
static const struct style BLOCKS = {"▕", "▏", "█", " ", {"▏", "▎", "▍", "▌", "▋", "▊", "▉"}, 8, "", "", ""};
static const struct style LINES = {"", "", "━", "━", {"╸"}, 2, "\x1b[36m", "\x1b[2m", "\x1b[0m"};

static const struct style *style_of(unsigned flags) {
    if (flags & DR_BAR_UNICODE)
        return flags & DR_BAR_COLOUR ? &LINES : &BLOCKS;
    return flags & DR_BAR_COLOUR ? &ASCII_COLOUR : &ASCII;
}

static int frame_of(const struct style *style) { return style->open[0] ? 2 : 0; }

static void put_bar(struct text *text, const struct dr_bar_view *view, int cells) {
    const struct style *style = style_of(view->flags);
    uint64_t filled = share(view, (uint64_t)cells * style->steps);
    int full = (int)(filled / style->steps), part = (int)(filled % style->steps);
    put_sign(text, style->open, style->open[0] ? 1 : 0);
    put_sign(text, style->full_colour, 0);
    for (int i = 0; i < full; i++)
        put_sign(text, style->full, 1);
    if (part)
        put_sign(text, style->part[part - 1], 1);
    put_sign(text, style->no_colour, 0);
    put_sign(text, style->empty_colour, 0);
    for (int i = full + (part > 0); i < cells; i++)
        put_sign(text, style->empty, 1);
    put_sign(text, style->no_colour, 0);
    put_sign(text, style->close, style->close[0] ? 1 : 0);
}

/* ---- lines ---- */

enum field { BYTES, RATE, LEFT, FIELDS };

static struct dr_bar_view plausible(const struct dr_bar_view *view) {
    struct dr_bar_view sane = *view;
    sane.columns = view->columns > 0 ? view->columns : DEFAULT_COLUMNS;
    sane.done = view->done < view->total ? view->done : view->total;
    return sane;
}

static void put_fraction(struct text *text, const struct dr_bar_view *view) {
    int unit = binary_unit(view->total);
    put_bytes(text, view->done, unit);
    put_ascii(text, "/");
    put_bytes(text, view->total, unit);
    put_ascii(text, " ");
    put_ascii(text, BINARY[unit]);
}

static int columns_of(const char *label) {
    int columns = 0;
    for (; *label; label++)
        columns += ((unsigned char)*label & 0xc0) != 0x80;
    return columns;
}

static struct text field_of(enum field field, const struct dr_bar_view *view, char data[FIELD]) {
    struct text text = text_in(data, FIELD);
    if (field == BYTES)
        put_fraction(&text, view);
    else if (field == RATE)
        put_rate(&text, view->rate);
    else
        put_left(&text, view);
    return text;
}

/* The fields after the bar, with two spaces before each; each keeps its width while its number changes. */
static void put_fields(struct text *text, const struct dr_bar_view *view, int count) {
    struct dr_bar_view widest = *view;
    widest.done = view->total;
    char data[FIELD];
    const int width[FIELDS] = {field_of(BYTES, &widest, data).columns, 9, 9};
    for (int i = 0; i < count; i++) {
        struct text field = field_of((enum field)i, view, data);
        put_ascii(text, "  ");
        for (int column = field.columns; column < width[i]; column++)
            put_ascii(text, " ");
        put_ascii(text, data);
    }
}

/* Where the columns do not suffice, the fields go first, the last one before the others; then the bar; then the label. */
void dr_bar_line(const struct dr_bar_view *wanted, char out[DR_BAR_LINE]) {
    struct dr_bar_view view = plausible(wanted);
    char percent[FIELD], fields[FIELDS * FIELD];
    struct text line = text_in(out, DR_BAR_LINE), tail;
    snprintf(percent, sizeof percent, " %3" PRIu64 "%%", share(&view, 100));
    int room = view.columns - 1 - (int)strlen(percent), count = FIELDS, cells;
    do {
        tail = text_in(fields, sizeof fields);
        put_fields(&tail, &view, count);
        cells = room - columns_of(view.label) - 2 - frame_of(style_of(view.flags)) - tail.columns;
    } while (cells < NARROWEST_BAR && count-- > 0);
    put_label(&line, view.label, room);
    if (cells >= NARROWEST_BAR) {
        put_ascii(&line, "  ");
        put_bar(&line, &view, cells < WIDEST_BAR ? cells : WIDEST_BAR);
    }
    if (room >= 0)
        put_ascii(&line, percent);
    put_ascii(&line, fields);
}

/* "saving: 4.0 GiB in 3.2 s, 1.34 GB/s", or how far it came; cut where the terminal ends. */
void dr_bar_last(const struct dr_bar_view *wanted, char out[DR_BAR_LINE]) {
    struct dr_bar_view view = plausible(wanted);
    char data[DR_BAR_LINE];
    struct text all = text_in(data, sizeof data), line = text_in(out, DR_BAR_LINE);
    put_label(&all, view.label, DR_BAR_LABEL);
    put_ascii(&all, view.failed ? ": stopped at " : ": ");
    if (view.done < view.total) {
        put_fraction(&all, &view);
    } else {
        put_bytes(&all, view.total, binary_unit(view.total));
        put_ascii(&all, " ");
        put_ascii(&all, BINARY[binary_unit(view.total)]);
    }
    put_ascii(&all, view.failed ? " after " : " in ");
    put_duration(&all, view.ms);
    if (!view.failed && view.ms > 0) {
        put_ascii(&all, ", ");
        put_rate(&all, dr_bar_rate(view.done, view.ms));
    }
    put_label(&line, data, view.columns - 1);
}
