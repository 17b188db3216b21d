/* From a JPEG file, or from pixels, to a small picture of one part of it, without the GIL.

   Lives here: what `decode.py` asks for in its inner loop, and no more. The filter is an antialiased
   one: a triangle, or a cubic. Whatever is not plain (progressive, CMYK, turned by EXIF,
   damaged) is left to the caller's other decoders. C11 with the vectors of GCC or Clang, and no library. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "jpeg.h"

static PyObject *plain_jpeg_size(PyObject *self, PyObject *file) {
  char *data;
  Py_ssize_t length;
  Header header;
  if (PyBytes_AsStringAndSize(file, &data, &length)) return NULL;
  if (read_header(&header, (uint8_t *)data, length) != DONE) Py_RETURN_NONE;
  return Py_BuildValue("ii", header.rows, header.columns);
}

/* Gets (height, width, channels) uint8 in one piece; 0 with an error set if it is anything else. */
static int get_picture(PyObject *array, int flags, Py_buffer *b) {
  if (PyObject_GetBuffer(array, b, PyBUF_ND | flags)) return 0;
  const Py_ssize_t most = 1 << 24;
  if (b->ndim == 3 && b->shape[2] > 0 && b->shape[2] <= MOST_CHANNELS && b->itemsize == 1 && b->shape[0] > 0 &&
      b->shape[1] > 0 && b->shape[0] <= most && b->shape[1] <= most)
    return 1;
  PyBuffer_Release(b);
  PyErr_SetString(PyExc_ValueError,
                  "a picture must be (height, width, channels) uint8, of 1 to 2**24 pixels a side and 1 to 16 channels");
  return 0;
}

static PyObject *answer(int status) {
  return status == NO_MEMORY ? PyErr_NoMemory() : PyBool_FromLong(status == DONE);
}

static PyObject *py_cut_jpeg(PyObject *self, PyObject *args) {
  const char *data;
  Py_ssize_t length;
  int inside, cubic, status;
  double part[4], spare;
  Header header;
  PyObject *array;
  Py_buffer out;
  if (!PyArg_ParseTuple(args, "y#(dddd)pdpO", &data, &length, part, part + 1, part + 2, part + 3, &inside, &spare,
                        &cubic, &array) ||
      !get_picture(array, PyBUF_WRITABLE, &out))
    return NULL;
  Py_BEGIN_ALLOW_THREADS;
  status = read_header(&header, (const uint8_t *)data, length);
  if (status == DONE)
    status = cut_jpeg(&header, part, inside, spare, cubic, out.buf, out.shape[0], out.shape[1], out.shape[2]);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&out);
  return answer(status);
}

static PyObject *py_cut_pixels(PyObject *self, PyObject *args) {
  int inside, cubic, status;
  double part[4];
  PyObject *source, *array;
  Py_buffer pixels, out;
  if (!PyArg_ParseTuple(args, "O(dddd)ppO", &source, part, part + 1, part + 2, part + 3, &inside, &cubic, &array) ||
      !get_picture(source, 0, &pixels))
    return NULL;
  if (!get_picture(array, PyBUF_WRITABLE, &out)) {
    PyBuffer_Release(&pixels);
    return NULL;
  }
  if (pixels.shape[2] != out.shape[2]) {
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&out);
    PyErr_SetString(PyExc_ValueError, "the two pictures must have as many channels");
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  status = cut_pixels(pixels.buf, pixels.shape[0], pixels.shape[1], pixels.shape[2], part, inside, cubic,
                      out.buf, out.shape[0], out.shape[1]);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&pixels);
  PyBuffer_Release(&out);
  return answer(status);
}

static PyMethodDef methods[] = {
    {"plain_jpeg_size", plain_jpeg_size, METH_O,
     "plain_jpeg_size(file: bytes) -> (height, width), or None if cut_jpeg is not for it."},
    {"cut_jpeg", py_cut_jpeg, METH_VARARGS,
     "cut_jpeg(file, (top, left, bottom, right), inside, spare, cubic, out) -> whether it could."},
    {"cut_pixels", py_cut_pixels, METH_VARARGS,
     "cut_pixels(pixels, (top, left, bottom, right), inside, cubic, out) -> whether it could."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "See module.c.", -1, methods,
                                    NULL, NULL, NULL, NULL};

/* Raise it, here and in decode.py, when a function takes other arguments or gives other pixels. */
enum { INTERFACE = 2 };

PyMODINIT_FUNC PyInit__native(void) {
  PyObject *made = PyModule_Create(&module);
  if (made && PyModule_AddIntConstant(made, "INTERFACE", INTERFACE)) Py_CLEAR(made);
  return made;
}
