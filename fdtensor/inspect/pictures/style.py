"""The style sheets of pictures: all names start with `fdshow`, colors are those of the page."""

from __future__ import annotations

__all__ = ["DRAWING", "MONO", "STYLE"]

MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
"""The fonts of code and labels."""

STYLE = f"""
.fdshow {{ font:13px/1.5 system-ui,sans-serif; color:inherit; max-width:100%; margin:2px 0 6px }}
.fdshow svg {{ display:block; overflow:visible }}
.fdshow .fdshow-title {{ font:600 13px/1.5 {MONO}; overflow-wrap:anywhere; margin:0 0 6px }}
.fdshow .fdshow-facts {{ display:grid; grid-template-columns:max-content 1fr; column-gap:14px;
    margin:0 0 8px }}
.fdshow .fdshow-name {{ font:600 12px/1.6 {MONO}; opacity:.85; overflow-wrap:anywhere }}
.fdshow .fdshow-stages {{ display:flex; flex-wrap:wrap; align-items:flex-start; gap:10px 22px }}
.fdshow .fdshow-blocks, .fdshow .fdshow-scroll {{ max-width:100%; overflow-x:auto }}
.fdshow .fdshow-panels {{ display:flex; flex-wrap:wrap; gap:10px 16px }}
.fdshow .fdshow-caption {{ font:12px/1.5 {MONO}; overflow-wrap:anywhere; margin:0 0 2px }}
.fdshow .fdshow-empty {{ display:inline-block; border:1px dashed; border-radius:3px; padding:0 8px;
    margin:2px 0; font-size:12px }}
.fdshow .fdshow-note {{ font-size:12px; opacity:.75; margin:4px 0 0 }}
.fdshow .fdshow-move {{ max-width:190px; padding-top:20px; font-size:12px }}
.fdshow .fdshow-move b {{ font:600 11px/1.5 {MONO}; overflow-wrap:anywhere }}
.fdshow .fdshow-arrow {{ font-size:20px; line-height:1; opacity:.7 }}
.fdshow table.fdshow-table {{ border-collapse:collapse; border:0; margin:2px 0 10px; font-size:12px;
    width:auto; color:inherit }}
.fdshow table.fdshow-table tr {{ background:none; border:0 }}
.fdshow table.fdshow-table tr.fdshow-marked {{ background:rgba(128,128,128,.22); font-weight:600 }}
.fdshow table.fdshow-table th, .fdshow table.fdshow-table td {{ border:0; padding:1px 14px 1px 0;
    text-align:left; vertical-align:top; font-family:{MONO}; white-space:pre-wrap;
    max-width:none; color:inherit; background:none }}
.fdshow table.fdshow-table th {{ border-bottom:1px solid rgba(128,128,128,.5); font-weight:600 }}
.fdshow table.fdshow-table .fdshow-right {{ text-align:right; white-space:pre }}
.fdshow .fdshow-bar {{ display:inline-block; height:8px; background:currentColor; opacity:.6;
    border-radius:1px }}
"""
"""The style of a picture as HTML."""

DRAWING = """
svg { color:#1b1b1b }
.fdshow-paper { fill:#ffffff }
@media (prefers-color-scheme:dark) { svg { color:#e6e6e6 } .fdshow-paper { fill:#16181c } }
"""
"""The style of a picture as an SVG file, which has a background of its own."""
