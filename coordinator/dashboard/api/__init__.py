"""The JSON API. Each endpoint is declared once; routes, checks, and the OpenAPI description are made from the declaration.

endpoint   a declaration, and what every request passes through: caller, query, body, answer
answers    what the endpoints answer
reads      everything the pages show
acts       everything operators do (coordinator.actions)
openapi    the description, and the page that shows it
"""
