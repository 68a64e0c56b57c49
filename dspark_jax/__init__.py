"""DSpark speculative-decoding drafters in JAX: train, measure, ship.

A large language model (the *target*) decodes one token per pass over all its weights. A *drafter*
proposes a block of tokens in one parallel pass over hidden states *tapped* from several target
layers, a low-rank Markov head restores the dependency between neighbours, a confidence head
predicts which proposals will survive, and the target verifies them in one pass. Rejection
sampling keeps the output distribution exactly the target's (DSpark, arXiv 2607.05147).

Where to read: the train step in `training/step.py`, one speculative round in
`decoding/rounds.py`, the export in `weights/export.py`. Files at the top are commands.

Letters in shapes, everywhere:

    B  batch rows                    D  hidden size
    S  sequence (context) length     V  vocabulary
    T  tokens fed in one call        R  Markov rank
    A  anchors of a row              N  query heads, K key/value heads, N = K * Q
    G  slots of a block (gamma)      H  head dimension
    L  tapped layers                 F  MLP width
"""

__version__ = "0.1.0"
