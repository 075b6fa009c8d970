"""`python -m piebridge.core.descriptions`: capture the known networks anew."""

from piebridge.core.descriptions import write_descriptions

if __name__ == "__main__":
    write_descriptions()
