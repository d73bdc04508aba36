"""From logits to tokens: samplers, beam search, generation."""
