"""What people and programs get to see of a run: terminal tables, progress, the JSON document, README's table of results."""
