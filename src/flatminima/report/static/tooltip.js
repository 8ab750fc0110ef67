// One tooltip for everything that has data-tip: on hover, on focus, away with Escape.
"use strict";
(() => {
  const tip = document.getElementById("tip");
  let shown = null;

  function place(element) {
    const box = element.getBoundingClientRect();
    const width = tip.offsetWidth, height = tip.offsetHeight, gap = 8;
    const view = document.documentElement.clientWidth;
    const left = Math.min(Math.max(gap, box.left + box.width / 2 - width / 2), Math.max(gap, view - width - gap));
    const above = box.top - height - gap;
    const top = above > gap ? above : box.bottom + gap;
    tip.style.left = `${left + window.scrollX}px`;
    tip.style.top = `${top + window.scrollY}px`;
  }

  function show(element) {
    hide();
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    element.setAttribute("aria-describedby", "tip");
    place(element);
    shown = element;
  }

  function hide() {
    if (shown) shown.removeAttribute("aria-describedby");
    tip.hidden = true;
    shown = null;
  }

  const owner = (event) => event.target instanceof Element && event.target.closest("[data-tip]");
  document.addEventListener("mouseover", (event) => {
    const element = owner(event);
    if (element && element !== shown) show(element);
    else if (!element && shown !== document.activeElement) hide();
  });
  document.addEventListener("focusin", (event) => {
    const element = owner(event);
    if (element) show(element);
    else hide();
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
  window.addEventListener("resize", hide);
})();
