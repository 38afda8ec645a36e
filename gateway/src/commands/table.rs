//! Columns, aligned.

use std::io::{self, Write};

const GAP: &str = "  ";

/// Writes rows, each column as wide as its widest cell. Nothing is cut off.
pub(crate) fn write(out: &mut impl Write, rows: &[Vec<String>]) -> io::Result<()> {
    let column_count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..column_count)
        .map(|column| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join(GAP).trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(rows: &[&[&str]]) -> String {
        let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(ToString::to_string).collect()).collect();
        let mut out = Vec::new();
        write(&mut out, &rows).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn columns_align_by_characters_and_lines_have_no_tail() {
        let rows: [&[&str]; 3] = [&["NAME", "SERVICES"], &["caf\u{e9}-long", "api, b"], &["-", ""]];
        assert_eq!(written(&rows), "NAME       SERVICES\ncaf\u{e9}-long  api, b\n-\n");
        assert_eq!(written(&[]), "");
    }
}
