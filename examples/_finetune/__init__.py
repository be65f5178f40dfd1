"""Parts of finetune.py: its arguments, its memory, and the folder that it writes."""
