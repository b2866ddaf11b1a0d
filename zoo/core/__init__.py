"""What every decoder runs. Imports no other room, except the kernels' table."""
