"""The textbook: how a hidden state becomes a word, and how the model learns from its mistake.

Everything in NumPy float64, forward and backward written out side by side, each function with its
formula and an example. It is slow and plain on purpose: the fast paths of lmhead are tested against
it. Read the chapters in this order:

     1. `linear`         y = x Wᵀ + b, activations, initial weights
     2. `softmax`        from scores to probabilities: stability, temperature, gradients
     3. `head`           the logits of a language model: linear, scale, soft-capping
     4. `cross_entropy`  the loss and its gradient p - y, in all its variants
     5. `queries`        log-probability, rank, entropy, argmax, top-k, KL
     6. `classifier`     softmax regression: the same four steps sort flowers
     7. `norm`           layer norm, Add & Norm
     8. `attention`      a softmax that decides where to look
     9. `feed_forward`   two linear layers and a bend
    10. `decoding`       greedy, sampling, top-k, top-p, min-p
    11. `hierarchical`   a word as a path of yes-or-no questions
    12. `truncation`     temperature, top-h, typical, epsilon, eta, top-n-sigma, XTC
    13. `mirostat`       a filter that steers itself
    14. `penalties`      repetition, frequency, presence, n-grams, DRY
    15. `constraints`    biases, bad words, forced words, guidance
    16. `philox`         random numbers that can be looked up
    17. `adaptive`       frequent words in full width, rare ones in clusters
    18. `sampled`        learning from the target and a few random words

>>> from lmhead import reference as ref
>>> logits = ref.head_logits([1.0, 2.0], weight=[[1, 0], [0, 1], [1, 1]])
>>> ref.softmax(logits).round(3)
array([0.09 , 0.245, 0.665])
>>> ref.cross_entropy_backward(logits, 2).round(3)  # p - y
array([ 0.09 ,  0.245, -0.335])
"""

from lmhead.reference.adaptive import (
    AdaptiveGrads,
    Cluster,
    adaptive_log_probs,
    adaptive_log_probs_backward,
)
from lmhead.reference.arrays import (
    Array,
    Ids,
    floats,
    ids_below,
    one_hot,
)
from lmhead.reference.attention import (
    AttentionGrads,
    attention,
    attention_backward,
    attention_weights,
    causal_mask,
)
from lmhead.reference.classifier import (
    SoftmaxRegression,
    fit_softmax_regression,
    regression_gradients,
    regression_loss,
)
from lmhead.reference.constraints import (
    allowed_filter,
    bad_words_filter,
    begin_suppress_filter,
    forced_tokens,
    guidance,
    logit_bias,
    min_length_filter,
    sequence_bias,
    suppress_filter,
)
from lmhead.reference.cross_entropy import (
    cross_entropy,
    cross_entropy_backward,
    linear_cross_entropy,
    linear_cross_entropy_backward,
    target_weights,
)
from lmhead.reference.decoding import (
    greedy,
    gumbel,
    min_p_filter,
    sample_gumbel,
    sample_inverse_cdf,
    top_k_filter,
    top_p_filter,
)
from lmhead.reference.feed_forward import (
    FeedForwardGrads,
    feed_forward,
    feed_forward_backward,
)
from lmhead.reference.head import (
    head_logits,
    head_logits_backward,
    softcap,
    softcap_backward,
)
from lmhead.reference.hierarchical import (
    Branches,
    DecisionTree,
    Nested,
    Path,
    Tree,
    decision_tree,
    huffman_nested,
    huffman_tree,
    leaf_log_prob,
    leaf_log_prob_backward,
    leaf_probabilities,
    word_log_prob,
    word_log_prob_backward,
)
from lmhead.reference.linear import (
    LinearGrads,
    bias_uniform,
    gelu,
    gelu_backward,
    kaiming_uniform,
    linear,
    linear_backward,
    relu,
    relu_backward,
    sigmoid,
    sigmoid_backward,
)
from lmhead.reference.mirostat import (
    mirostat_1_filter,
    mirostat_2_filter,
    mirostat_k,
    mirostat_update,
)
from lmhead.reference.norm import (
    LayerNormGrads,
    layer_norm,
    layer_norm_backward,
    post_norm,
    post_norm_backward,
    pre_norm,
    pre_norm_backward,
)
from lmhead.reference.penalties import (
    dry_penalty,
    dry_repeats,
    frequency_penalty,
    no_repeat_ngram_filter,
    presence_penalty,
    repetition_penalty,
)
from lmhead.reference.philox import (
    philox_4x32,
    philox_gumbel,
    philox_uniform,
)
from lmhead.reference.queries import (
    argmax,
    descending_order,
    entropy,
    entropy_backward,
    kl,
    kl_backward,
    log_prob,
    log_prob_backward,
    rank,
    top_k,
)
from lmhead.reference.sampled import (
    SampledGrads,
    log_uniform,
    noise_contrastive,
    noise_contrastive_backward,
    sampled_softmax,
    sampled_softmax_backward,
)
from lmhead.reference.softmax import (
    log_softmax,
    log_softmax_backward,
    logsumexp,
    logsumexp_backward,
    normalize,
    normalize_backward,
    softmax,
    softmax_backward,
    softmax_jacobian,
    softmax_naive,
)
from lmhead.reference.truncation import (
    dynamic_temperature,
    epsilon_filter,
    eta_filter,
    temperature_scale,
    top_h_filter,
    top_n_sigma_filter,
    typical_filter,
    xtc_filter,
)

# In the order of the chapters, not of the alphabet.
__all__ = [  # noqa: RUF022
    # arrays
    "Array",
    "Ids",
    "floats",
    "ids_below",
    "one_hot",
    # 1. linear
    "linear",
    "LinearGrads",
    "linear_backward",
    "relu",
    "relu_backward",
    "sigmoid",
    "sigmoid_backward",
    "gelu",
    "gelu_backward",
    "kaiming_uniform",
    "bias_uniform",
    # 2. softmax
    "normalize",
    "normalize_backward",
    "softmax_naive",
    "softmax",
    "softmax_jacobian",
    "softmax_backward",
    "logsumexp",
    "logsumexp_backward",
    "log_softmax",
    "log_softmax_backward",
    # 3. head
    "softcap",
    "softcap_backward",
    "head_logits",
    "head_logits_backward",
    # 4. cross_entropy
    "target_weights",
    "cross_entropy",
    "cross_entropy_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    # 5. queries
    "log_prob",
    "log_prob_backward",
    "entropy",
    "entropy_backward",
    "descending_order",
    "argmax",
    "top_k",
    "rank",
    "kl",
    "kl_backward",
    # 6. classifier
    "SoftmaxRegression",
    "regression_loss",
    "regression_gradients",
    "fit_softmax_regression",
    # 7. norm
    "layer_norm",
    "LayerNormGrads",
    "layer_norm_backward",
    "post_norm",
    "post_norm_backward",
    "pre_norm",
    "pre_norm_backward",
    # 8. attention
    "causal_mask",
    "attention_weights",
    "attention",
    "AttentionGrads",
    "attention_backward",
    # 9. feed_forward
    "feed_forward",
    "FeedForwardGrads",
    "feed_forward_backward",
    # 10. decoding
    "greedy",
    "sample_inverse_cdf",
    "gumbel",
    "sample_gumbel",
    "top_k_filter",
    "top_p_filter",
    "min_p_filter",
    # 11. hierarchical
    "Path",
    "Tree",
    "huffman_tree",
    "leaf_log_prob",
    "leaf_log_prob_backward",
    "leaf_probabilities",
    "Nested",
    "Branches",
    "DecisionTree",
    "decision_tree",
    "huffman_nested",
    "word_log_prob",
    "word_log_prob_backward",
    # 12. truncation
    "temperature_scale",
    "dynamic_temperature",
    "top_h_filter",
    "typical_filter",
    "epsilon_filter",
    "eta_filter",
    "top_n_sigma_filter",
    "xtc_filter",
    # 13. mirostat
    "mirostat_1_filter",
    "mirostat_k",
    "mirostat_2_filter",
    "mirostat_update",
    # 14. penalties
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "no_repeat_ngram_filter",
    "dry_penalty",
    "dry_repeats",
    # 15. constraints
    "logit_bias",
    "sequence_bias",
    "bad_words_filter",
    "allowed_filter",
    "suppress_filter",
    "begin_suppress_filter",
    "min_length_filter",
    "forced_tokens",
    "guidance",
    # 16. philox
    "philox_4x32",
    "philox_uniform",
    "philox_gumbel",
    # 17. adaptive
    "Cluster",
    "adaptive_log_probs",
    "AdaptiveGrads",
    "adaptive_log_probs_backward",
    # 18. sampled
    "log_uniform",
    "sampled_softmax",
    "SampledGrads",
    "sampled_softmax_backward",
    "noise_contrastive",
    "noise_contrastive_backward",
]
