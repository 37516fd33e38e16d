"""What a checkpoint's files say: docs/format.md in Python.

``metadata`` reads and writes ``.metadata``: a pickle, an index, a trailer. ``outline`` reads the pickle without torch,
for the command line. ``manifest`` is what a Checkpointer notes. ``archive`` finds the pickle in an archive of
``torch.save``. ``lazy`` is a ``Metadata`` whose entries
stay in tables of C until somebody looks. ``properties`` encodes what a tensor is, for tables and for the pickle.
``unpickler`` knows which names a pickle may use and what they make (``unpickler_numpy``: NumPy's), ``zip`` writes the
archives of which only the payloads' sizes are known before. ``safetensors`` checks and makes the header of such a file,
``model_files`` tells what the files of a model hold, and ``quantised`` what is made of tensors that are codes.
``boxes`` tells whether chunks make up a tensor.

Planners make metadata and read it, loads unpickle objects, the store keeps both in files: all call this, and it calls
none of them. It opens no data file. A table belongs to the ``Chunks`` that has it; planners and loads borrow it.
"""
