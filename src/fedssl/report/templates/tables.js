// Tell readers of a narrow screen that a table has more columns than they see.
(() => {
  const watch = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      target.previousElementSibling.hidden = target.scrollWidth <= target.clientWidth + 1;
    }
  });
  for (const box of document.querySelectorAll(".wide")) watch.observe(box);
})();
