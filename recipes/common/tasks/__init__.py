"""Tasks other than text: classifying pictures, encoding texts, pictures found by captions."""
