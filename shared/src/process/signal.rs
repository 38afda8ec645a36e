//! Signals of this process.

use std::fs;
use std::io;

/// Whether the program that started this one has set the signal to be ignored, as `nohup` does with
/// SIGHUP (proc_pid_status(5)). Programs leave such signals ignored.
pub fn is_ignored(signal: i32) -> io::Result<bool> {
    is_in(&fs::read_to_string("/proc/self/status")?, signal)
}

fn is_in(status: &str, signal: i32) -> io::Result<bool> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Bit N - 1 is signal N.
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let mask = mask.ok_or_else(|| io::Error::other("/proc/self/status has no SigIgn"))?;
    Ok(u32::try_from(signal - 1)
        .is_ok_and(|bit| mask.checked_shr(bit).is_some_and(|rest| rest & 1 == 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_the_mask_are_signals() {
        let status = "Name:\tx\nSigBlk:\tffffffffffffffff\nSigIgn:\t0000000000001001\n\
                      SigCgt:\t0000000000000000\n";
        let ignored: Vec<i32> = (-1..70)
            .filter(|signal| is_in(status, *signal).unwrap())
            .collect();
        assert_eq!(ignored, [1, 13]);
        assert!(is_in("Name:\tx\n", 1).is_err());
    }
}
