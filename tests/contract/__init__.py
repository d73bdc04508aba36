"""What every way to compute the loss and the answers of a head must do, ours and torch's alike."""
