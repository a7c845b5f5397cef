"""Reports: tables in, one self-contained HTML page out; needs neither torch nor transformers."""
