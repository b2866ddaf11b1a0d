"""What a field of a Config or a call turns on."""
