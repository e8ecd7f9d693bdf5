import typer
def build_app(): 
    app = typer.Typer()
    @app.command()
    def render(): ...
    return app
