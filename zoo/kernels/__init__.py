"""One operation on one device: attention kernels and the table that chooses among them."""
