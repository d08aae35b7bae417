"""From tasks to a document: what is built, checked and timed when, by which process, and what verdict follows."""
