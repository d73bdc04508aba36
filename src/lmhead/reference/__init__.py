"""The textbook: how a hidden state becomes a word, and how the model learns from its mistake.

Everything in NumPy float64, forward and backward side by side, each function with its formula and
an example. It is slow and plain on purpose: the fast paths of lmhead are tested against it. Read
the chapters in this order; the public names of each are in its `__all__`:

     1. `linear`           y = x Wᵀ + b, activations, initial weights
     2. `softmax`          from scores to probabilities: stability, temperature, gradients
     3. `output_layer`     the logits of a language model: linear, scale, soft-capping
     4. `cross_entropy`    the loss and its gradient p - y, in all its variants
     5. `queries`          log-probability, rank, entropy, argmax, top-k, KL
     6. `classifier`       softmax regression: the same four steps sort flowers
     7. `norm`             layer norm, Add & Norm
     8. `attention`        a softmax that decides where to look
     9. `feed_forward`     two linear layers with an activation between
    10. `decoding`         greedy, sampling, top-k, top-p, min-p
    11. `hierarchical`     a word as a path of yes-or-no questions
    12. `truncation`       temperature, top-h, typical, epsilon, eta, top-n-sigma, XTC
    13. `mirostat`         a filter that steers itself
    14. `penalties`        repetition, frequency, presence, n-grams, DRY
    15. `constraints`      biases, bad words, forced words, guidance
    16. `philox`           random numbers that can be looked up
    17. `adaptive`         frequent words in full width, rare ones in clusters
    18. `sampled_softmax`  learning from the target and a few random words
    19. `divergences`      how far two models are apart: KL, Jensen-Shannon, total variation

>>> from lmhead import reference as ref
>>> logits = ref.head_logits([1.0, 2.0], weight=[[1, 0], [0, 1], [1, 1]])
>>> ref.softmax(logits).round(3)
array([0.09 , 0.245, 0.665])
>>> ref.cross_entropy_backward(logits, 2).round(3)  # p - y
array([ 0.09 ,  0.245, -0.335])
"""

# ruff: noqa: F403

from lmhead.reference.adaptive import *
from lmhead.reference.arrays import *
from lmhead.reference.attention import *
from lmhead.reference.classifier import *
from lmhead.reference.constraints import *
from lmhead.reference.cross_entropy import *
from lmhead.reference.decoding import *
from lmhead.reference.divergences import *
from lmhead.reference.feed_forward import *
from lmhead.reference.hierarchical import *
from lmhead.reference.linear import *
from lmhead.reference.mirostat import *
from lmhead.reference.norm import *
from lmhead.reference.output_layer import *
from lmhead.reference.penalties import *
from lmhead.reference.philox import *
from lmhead.reference.queries import *
from lmhead.reference.sampled_softmax import *
from lmhead.reference.softmax import *
from lmhead.reference.truncation import *
