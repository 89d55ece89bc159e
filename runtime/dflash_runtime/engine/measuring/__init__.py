"""Measures what a machine's devices and links do with one model's formats and sizes.

::

    layers (which of them) ─ loaded_layers ─ passes ─ devices ─┐
    host_stops ─ copies ─ pcie ─ disk ─ together ─ links ──────┴─ measure ─ kept

Everything is measured as it will run: the model's own layers, through recorded steps where the
engine records them. Results are the types of `placement.box`.
"""
