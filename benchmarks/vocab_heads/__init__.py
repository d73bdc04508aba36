"""Heads for huge vocabularies: what they learn, what they cost, how the cost grows with V.

python -m benchmarks.vocab_heads.training     perplexity, time and memory on WikiText-2
python -m benchmarks.vocab_heads.scaling      time for 10,000 to 1,000,000 words

heads       the heads under their names, and what is asked of them
peers       torch's own full and adaptive softmax
timing      all of them side by side; memory in a fresh process
report      tables and plots
"""
