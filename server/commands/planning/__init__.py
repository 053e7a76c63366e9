"""What the commands that plan share: which model, how it is measured and searched, and the files of plans."""
