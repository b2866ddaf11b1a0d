"""Files of a command, on a disk or in a bucket (gs://): folders, their lock, logs of JSON lines."""
