"""`python -m piebridge.core.descriptions`: capture the known networks anew."""

from piebridge.core.descriptions import write_descriptions

write_descriptions()
