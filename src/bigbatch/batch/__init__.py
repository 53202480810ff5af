"""What a batch is: cut it, weigh it, collate it, move it."""
