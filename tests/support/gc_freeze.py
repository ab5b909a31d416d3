"""The last that the server imports which ranks are forked from: no rank looks through all of that for garbage."""

import gc

gc.collect()
gc.freeze()
