"""Style of the page, in Gradio's colors, so that it follows the browser's light or dark theme."""

CSS = """
.gradio-container > main { max-width: 1320px !important; margin: 0 auto !important; width: 100%; }
#head h1 { margin: 0; font-size: 1.5rem; }
#head p { margin: .15rem 0 0; color: var(--body-text-color) !important; opacity: .7; }
#side { gap: .75rem; }
#side button { min-width: 4rem; }
#names .wrap { max-height: 14rem; overflow-y: auto; flex-direction: column; flex-wrap: nowrap; }
#names .wrap label { width: 100%; }
#main { gap: .5rem; }
#state, #transcript { min-height: 0; padding: 0; }
.transcript { height: max(20rem, calc(100vh - 26.5rem)); overflow-y: auto; display: flex;
  flex-direction: column-reverse; padding: .25rem 1rem; border: 1px solid var(--border-color-primary);
  border-radius: .5rem; background: var(--background-fill-secondary); }
.transcript > div { margin-bottom: auto !important; }
.transcript .note { margin: .75rem 0; text-align: center; font-size: .85rem;
  color: var(--body-text-color) !important; opacity: .7; }
.transcript .turn { margin: 1rem 0; }
.transcript .question { margin: 0 0 .6rem auto; width: fit-content; max-width: 80%; padding: .5rem .9rem;
  white-space: pre-wrap; overflow-wrap: anywhere; border-radius: 1rem 1rem .2rem 1rem;
  background: var(--color-accent-soft); }
.transcript .answers { display: grid; grid-auto-columns: 1fr; grid-auto-flow: column; gap: .75rem; }
.transcript article { min-width: 0; padding: .6rem .9rem; border-radius: .5rem;
  border: 1px solid var(--border-color-primary); border-top: 3px solid var(--color-accent);
  background: var(--background-fill-primary); }
.transcript article.without { border-top-color: var(--neutral-400); }
.transcript h4 { margin: 0 0 .35rem; font-size: .75rem; font-weight: 600;
  color: var(--body-text-color) !important; opacity: .7; }
.transcript .answer { overflow-wrap: anywhere; }
.transcript .answer > * { margin: 0 0 .5rem; }
.transcript .answer > :last-child { margin: 0; }
.transcript pre { overflow-x: auto; padding: .5rem; background: var(--background-fill-secondary); }
@media (max-width: 700px) { .transcript .answers { grid-auto-flow: row; } }
.state { display: flex; align-items: center; gap: .75rem; min-height: 1.5rem; font-size: .9rem; }
.state progress { flex: 1; height: .6rem; accent-color: var(--color-accent); }
.state .busy { opacity: .7; }
.state .problem { color: var(--error-text-color) !important; }
.sizes { margin: 0; padding: 0; font-size: .82rem; line-height: 1.6; overflow-wrap: anywhere; }
.sizes p { margin: 0; color: var(--body-text-color) !important; opacity: .7; }
"""
