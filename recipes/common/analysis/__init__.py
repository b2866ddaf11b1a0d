"""What is where and what a compiled step sends: text, tables, pictures."""
