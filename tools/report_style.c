/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report_style.c - how the page of a report looks, and the script that sorts and filters its table.
 *
 * Colors are named once for light and once for dark; paper is light. Below 620 px, tables become lists: a row is a small
 * grid and every value says what it is. The script makes its own controls, so that a page without scripts has none, and
 * knows nothing of names: it reads the table. The policy in the page's head allows this script by its hash and nothing
 * else; tests/cli/look.py prints the hash that a changed script needs.
 */
#include "report_html.h"

#define LIGHT                                                                                                    \
    "--bg:#fff;--panel:#f5f7f9;--ink:#1c2128;--soft:#56606b;--line:#dde3e9;--strong:#aab3bd;--link:#0b5cad;"     \
    "--before:#b9c5d2;--after:#2f7fc4;--bad:#b3261e;--band:#fbefee;--c0:#0072b2;--c1:#c65300;--c2:#007a5a;--c3:" \
    "#a6478a;--c4:#8a6d00;--c5:#3a86c8;--c6:#4d5661;--c7:#b3261e;"
#define DARK                                                                                                     \
    "--bg:#12161b;--panel:#1b2129;--ink:#e3e8ed;--soft:#a2adb9;--line:#2b333d;--strong:#57626f;--link:#7ab8f5;"  \
    "--before:#4b5868;--after:#4b9ee0;--bad:#ff8a80;--band:#2d1e20;--c0:#4ba6e8;--c1:#f08a4b;--c2:#39b58e;--c3:" \
    "#d58abf;--c4:#d0ab3a;--c5:#8fc3f2;--c6:#b4bec9;--c7:#ff8a80;"

const char *const report_style[] = {
    ":root{color-scheme:light dark;" LIGHT "}", "@media(prefers-color-scheme:dark){:root{" DARK "}}",
    "*{box-sizing:border-box}", "html{-webkit-text-size-adjust:100%}",
    "body{font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif;color:var(--ink);"
    "background:var(--bg);max-width:1080px;margin:0 auto;padding:2.6rem 1.5rem "
    "3rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}",
    "a{color:var(--link);text-underline-offset:.15em;text-decoration-thickness:1px}",
    ":focus-visible{outline:2px solid var(--link);outline-offset:2px}",
    "h1{font-size:1.75rem;line-height:1.2;letter-spacing:-.01em;margin:0 0 .3rem;overflow-wrap:anywhere}",
    "h2{font-size:1.2rem;margin:3rem 0 .6rem}", "h3{font-size:.95rem;margin:1.3rem 0 .4rem}",
    "p{margin:.4rem 0 .9rem;max-width:46rem}", ".sub,caption,figcaption,footer,.note{color:var(--soft)}",
    ".sub{margin:0 0 1.6rem}", "nav ul,.tiles,.legend,.names{list-style:none;margin:0;padding:0}",
    "nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.9rem;margin-top:1.3rem}",
    ".tiles{display:grid;grid-template-columns:repeat(3,1fr);gap:.8rem}",
    ".tiles li{background:var(--panel);border-radius:8px;padding:.75rem .9rem}",
    ".tiles b{display:block;white-space:nowrap;font-size:1.3rem;line-height:1.3;font-weight:600;letter-spacing:-.01em}",
    ".tiles span{color:var(--soft);font-size:.84rem;line-height:1.35;display:block}",
    "table{border-collapse:collapse;width:100%;font-size:.88rem}", "caption{text-align:left;padding:0 0 .4rem}",
    "th,td{padding:.34rem .7rem;border-bottom:1px solid var(--line);text-align:right;vertical-align:top;"
    "white-space:nowrap}",
    "th:first-child,td:first-child{padding-left:0}", "th:last-child,td:last-child{padding-right:0}",
    "th{font-weight:600;color:var(--soft);white-space:normal;overflow-wrap:normal;vertical-align:bottom;border-bottom-"
    "color:var(--strong)}",
    ".l{text-align:left;white-space:normal;overflow-wrap:anywhere}", "tbody tr:hover td{background:var(--panel)}",
    "code{font:.92em ui-monospace,'DejaVu Sans Mono','Liberation Mono',monospace;unicode-bidi:isolate;"
    "overflow-wrap:anywhere}",
    "figure{margin:0;break-inside:avoid}", "figcaption{font-size:.88rem;margin:.5rem 0 0;max-width:46rem}",
    "svg{display:block;width:100%;height:auto}",
    "svg.chart{font:12px system-ui,'Segoe UI',Roboto,'Liberation Sans',sans-serif;overflow:visible}",
    ".axis{stroke:var(--strong);fill:none}.grid{stroke:var(--line)}.tick{fill:var(--soft)}",
    ".bar0{fill:var(--before)}.bar1{fill:var(--after)}.bar2{fill:var(--bad)}.band{fill:var(--band)}",
    ".c0{fill:var(--c0);stroke:var(--c0)}.c1{fill:var(--c1);stroke:var(--c1)}.c2{fill:var(--c2);stroke:var(--c2)}",
    ".c3{fill:var(--c3);stroke:var(--c3)}.c4{fill:var(--c4);stroke:var(--c4)}.c5{fill:var(--c5);stroke:var(--c5)}",
    ".c6{fill:var(--c6);stroke:var(--c6)}.c7{fill:var(--c7);stroke:var(--c7)}",
    ".legend{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;font-size:.85rem;margin:.6rem 0 0}",
    ".legend svg{display:inline-block;width:14px;height:14px;vertical-align:-2px;margin-right:.4rem}",
    "#sizes .graph{width:38%;padding:.5rem 0}", "#sizes .graph svg{height:18px}",
    "td a{text-decoration:none}td a:hover{text-decoration:underline}", "h2,details{scroll-margin-top:1rem}",
    "table.short{max-width:34rem}", "#all td:first-child{min-width:13rem}",
    "#all td:nth-child(2){min-width:7rem;max-width:15rem;color:var(--soft)}",
    ".tools{display:flex;flex-wrap:wrap;gap:.6rem;align-items:end;margin:.8rem 0 1rem;font-size:.88rem}",
    ".tools label{display:flex;flex-direction:column;gap:.2rem;color:var(--soft)}", ".tools .wide{flex:1 1 14rem}",
    "input,select,button{font:inherit;color:var(--ink)}",
    "input,select{background:var(--bg);border:1px solid var(--strong);border-radius:6px;padding:.35rem .55rem;"
    "min-width:0;width:100%}",
    "::placeholder{color:var(--soft);opacity:1}", "output{color:var(--soft);padding:.4rem 0}",
    "th "
    "button{white-space:nowrap;border:0;background:none;padding:0;font-weight:600;color:inherit;cursor:pointer;text-"
    "align:inherit}",
    "th button::after{content:'\\2195';margin-left:.25em;font-weight:400}",
    "th[aria-sort=ascending] button::after{content:'\\2191'}",
    "th[aria-sort=descending] button::after{content:'\\2193'}", "th[aria-sort] button{color:var(--ink)}",
    "[hidden]{display:none!important}.js #all tbody{display:none}",
    ".tools button{background:var(--panel);border:1px solid var(--strong);border-radius:6px;padding:.35rem .8rem;"
    "cursor:pointer}",
    "details{border-bottom:1px solid var(--line)}", "summary{cursor:pointer;padding:.45rem 0;overflow-wrap:anywhere}",
    "summary:hover{background:var(--panel)}", "summary b{float:right;font-weight:600;margin-left:1rem}",
    "details.in{border:0}details.in summary{padding:.1rem 0;color:var(--link)}",
    ".names{columns:20rem;font-size:.85rem;padding:.2rem 0 .6rem}", ".weight{padding:.2rem 0 1.6rem}",
    ".facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:.6rem 1.4rem;margin:.6rem 0 "
    "1.4rem}",
    ".facts dt{color:var(--soft);font-size:.82rem}.facts dd{margin:0}",
    ".pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(17rem,1fr));gap:0 2.5rem}",
    "footer{font-size:.85rem;margin-top:3.5rem;border-top:1px solid var(--line);padding-top:.9rem}",
    /* Narrow: rows as lists */
    "@media screen and (max-width:980px){",
    "table.cards thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}",
    "table.cards,table.cards tbody{display:block}",
    "table.cards tr{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;padding:.55rem 0;border-bottom:1px solid var(--line)}",
    "table.cards td{display:block;border:0;padding:0;width:auto;text-align:left;white-space:normal}",
    "table.cards td:nth-child(n){min-width:0;max-width:none}",
    "table.cards td:first-child,table.cards td.whole{flex:1 0 100%}",
    "table.cards td::before{color:var(--soft);margin-right:.35em}",
    "#all td:nth-child(4)::before,#sizes td:nth-child(3)::before,#fates td:nth-child(3)::before{content:'before'}",
    "#all td:nth-child(5)::before,#sizes td:nth-child(4)::before,#fates td:nth-child(4)::before{content:'after'}",
    "#all td:nth-child(6)::before{content:'dB'}#all td:nth-child(7)::before{content:'zeroed'}",
    "#all td:nth-child(8)::before{content:'clipped'}#all td:nth-child(9)::before{content:'underflowed'}",
    "#sizes td:nth-child(2)::before,#fates td:nth-child(2)::before{content:'weights'}",
    "#sizes td:nth-child(2):empty{display:none}",
    "#sizes td:nth-child(5)::before{content:'bits'}#sizes .graph{flex:1 0 100%;width:100%;padding:.2rem 0 0}}",
    "@media screen and (max-width:620px){", "body{padding:1.4rem 1rem 2rem}h1{font-size:1.4rem}h2{margin-top:2.3rem}",
    ".tiles{grid-template-columns:1fr 1fr;gap:.6rem}.tiles li{padding:.6rem .7rem}.tiles b{font-size:1rem}",
    "svg.chart{font-size:23px}svg.small{font-size:13px}.chart .o,.side{display:none}",
    ".tools .wide{flex-basis:100%}.names{columns:auto}", "summary b{float:none;display:block;margin:0}}",
    /* Paper */
    "@media print{:root{color-scheme:light;" LIGHT "}",
    "body{max-width:none;padding:0;font-size:10pt}nav,.tools{display:none}h2{break-after:avoid;margin-top:1.6rem}",
    "tr,.weight,.tiles li{break-inside:avoid}thead{display:table-header-group}table{font-size:8pt}",
    "th,td{padding:.18rem .4rem}svg.chart{max-height:64mm}.tiles li{border:1px solid var(--line)}",
    "th button::after{content:''!important}#all td:nth-child(n){min-width:0}}", "@page{margin:16mm}", NULL
};

/* SHA-256 of the script, as the page's policy has it. */
const char report_script_hash[] = "sha256-xVZpN5+9DCj+MQdH4ZNq6C6w5MCfzVC3kMVqf1zpFEY=";

const char *const report_script[] = {
    /* Tens of thousands of rows take long to lay out: they are not shown before it is known which. */
    "(function(){'use strict';",
    "var "
    "root=document.documentElement,STEP=500,table,body,rows,heads,names,text,fate,order,count,more,all,limit,fates={};",
    "root.className='js';",
    "function add(parent,tag,text){var e=document.createElement(tag);if(text)e.textContent=text;",
    "parent.appendChild(e);return e}",
    "function field(tools,text,tag){return add(add(tools,'label',text),tag)}",
    "function value(row,i){var c=row.cells[i],v=c.getAttribute('data-v');return v===null?c.textContent:Number(v)}",
    "function show(){var words=text.value.toLowerCase().split(/\\s+/),found=0,list=document.createDocumentFragment();",
    "rows.forEach(function(r){if(fate.value&&r.getAttribute('data-f')!==fate.value)return;",
    "var name=names.get(r);if(!words.every(function(w){return name.indexOf(w)>=0}))return;",
    "if(found++<limit)list.appendChild(r)});",
    "body.textContent='';body.appendChild(list);more.hidden=all.hidden=found<=limit;",
    "count.textContent=found+' of '+rows.length+(found>limit?', '+limit+' shown':'')}",
    "function sort(i,down){var sign=down?-1:1,keys=new Map();rows.forEach(function(r){keys.set(r,value(r,i))});",
    "rows.sort(function(a,b){var x=keys.get(a),y=keys.get(b);",
    "if(x!==x||y!==y)return(x!==x)-(y!==y);return x<y?-sign:x>y?sign:0});",
    "heads.forEach(function(h,k){if(k===i)h.setAttribute('aria-sort',down?'descending':'ascending');",
    "else h.removeAttribute('aria-sort')});order.value=i+(down?'d':'a');first()}",
    "function first(){limit=rows.length>2*STEP?STEP:Infinity;show()}",
    "function button(tools,text,grow){var b=add(tools,'button',text);b.type='button';",
    "b.addEventListener('click',function(){limit=grow();show()});return b}",
    "function begin(){table=document.getElementById('all');if(!table)return;body=table.tBodies[0];",
    "rows=[].slice.call(body.rows);heads=[].slice.call(table.tHead.rows[0].cells);names=new Map();",
    "rows.forEach(function(r){names.set(r,(r.cells[0].textContent+' '+r.cells[1].textContent).toLowerCase())});",
    "var "
    "tools=document.createElement('div'),below=document.createElement('div');tools.className=below.className='tools';",
    "table.parentNode.insertBefore(tools,table);table.parentNode.insertBefore(below,table.nextSibling);",
    "text=field(tools,'Name or reason','input');text.type='search';text.parentNode.className='wide';",
    "text.placeholder='up_proj, layers.3, embedding';",
    "fate=field(tools,'Show','select');order=field(tools,'Order','select');count=add(tools,'output');",
    "more=button(below,STEP+' more',function(){return limit+STEP});all=button(below,'All',function(){return "
    "Infinity});",
    "add(fate,'option','all weights').value='';rows.forEach(function(r){var f=r.getAttribute('data-f');",
    "if(!fates[f]){fates[f]=1;add(fate,'option',f).value=f}});",
    "heads.forEach(function(h,i){var name=h.textContent;",
    "add(order,'option',name+', up').value=i+'a';add(order,'option',name+', down').value=i+'d';",
    "h.textContent='';var b=add(h,'button',name);b.type='button';b.addEventListener('click',function(){",
    "sort(i,h.getAttribute('aria-sort')==='ascending')})});",
    "order.value='5a';heads[5].setAttribute('aria-sort','ascending');",
    "order.addEventListener('change',function(){sort(parseInt(order.value,10),order.value.slice(-1)==='d')});",
    "text.addEventListener('input',first);fate.addEventListener('change',first);first()}",
    "function open(){var id=location.hash.slice(1),e=id&&document.getElementById(id);",
    "if(e&&e.tagName==='DETAILS'){e.open=true;e.scrollIntoView()}}",
    "document.addEventListener('DOMContentLoaded',function(){try{begin()}finally{root.className=''}",
    "window.addEventListener('hashchange',open);open()})})();",
    NULL
};
