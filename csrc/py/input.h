/* An Input as the calls that read from it see it. */
#ifndef DCPRING_PY_INPUT_H
#define DCPRING_PY_INPUT_H

#include "module.h"

#include "io/input.h"

/*
 * The files of an Input, which cannot be closed until input_give; NULL with an exception where it is none, or closed.
 */
struct dr_input *input_take(struct module_state *state, PyObject *object);
void input_give(PyObject *object);

#endif
