import dataclasses
def display(result): yield ""
def write_page(folder): (folder/"report.html").write_text("x")
to_json = dataclasses.asdict
