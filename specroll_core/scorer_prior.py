"""The count table that a scorer starts from. Written by `bench/fit_scorer_prior.py`; not for editing.

Two bytes per cell of the candidates' table, then of the tails': the hit rate in 255ths, and the trials it is worth.
"""

# fmt: off
TABLE = (
    'c-obfX>gN87{~v;(xh#UrX)Sm^h}#HX)c<iO_R3U7U<Nr+@*j}TUrq*h(Ngnoj7uQC>95(P@zx;l@SYSWkA#cKX8tSAUNRQF%Bp*'
    '_yI=0_$_XBH)(O=fbYzcclMXveg69#`^MtwpEzn#Rd}Rfzwz>9sIuuOCku(%QpS?90Ig1n`~r_T+n`SkF)jVgEO7>NihL+^Hg$%W'
    'tE>T~^$o!(Epu(N7Y25R*vngkcwv2CaLwla-G@({x)?8skE$h^n!@}qsGz>nn<0e(@ClVgHWU<2g`s$CT5(k?TrME5h5(KAjG5C3'
    '4DAHk+B#UOUSUi}x2f&kfW}29QL=7dWPRYm9c<Y(gyFO2Ad$(U>Pt-r<PtaJsfGws=Vm}>*CMkZ3*Mzx#wO@p$Za-3?slWz(ZN`r'
    '#RrGK43>qnP*k~=G1m+qTvOXnJG%u7S{;lv4*|0lEyvW!FJbMTVa5&)wqkJP1o{pg$F7mHNR}r@*QYCn(xipXln-?|XS)1y<e5Ft'
    'W$R#58X41<H^D><sH>g|C&^~a(cFrHIs#vH11g$kGFH{L4$rJ;hPiDzrVq39qALKj&tHX#O{>v#_zlJyp9QwR_a*v1Jcd1|t{_dV'
    'j;haKDTcnF7@A^bgc-|iu$DWJQ)xu4Kb<jCc|AO~b~xvCpd`70G2gspXqh<!Ro!zja}tl=oNc$!*xd!vwg9E`_A<8gz$lttTZL^a'
    'Td;ii63;EQJxBIo=!1{&@%i&8(5FY$XD&&D$7+S8A&(}OGv6E^d{f*gnwSSm-cg>Tb`$FSU6`|C3feaEdCxE0fVvse(AKm94V#>d'
    'b*@xl?Tb4wvv(_ox|cAv=FGQP{pK!o^>4)BjUO2sJO{ipI*P$}f5qvquEJ+7imLC`X@!_=H>0@<Xbo~Uf07R!?e%b*x5LOw2&;$!'
    'YkE4-v27=8i(47nIG4^{wFv8afaQYi-E$h7d;73;-ESB=a+R_7KO-1A+=!mHzQfVWm$|+G!Pzf<#^}AvxN+qHx``#KzWLNgD{a4~'
    'jvW#9`Wz?rtyLh<GYN}Z2N~P^_9cug>BP<x#aM1$%vkT1gBW;iG0q%civ0&T`}9H({eb{R_YYvpEuQo1BS9RybsW2ghH(2N55k3D'
    '5O;nL;_JJA;)i?paP+yxsQNx>4q&je5&blcWrBT9?~F?$)RqO&8{qq$-2j{$Cb)KJ0Hf=9&cC5o#mxZ&uKlzUk8bkw-K9Qn91Y@^'
    '`$62^A7G3kJor9{`xmd{;cdS556b?g8XrD-fWIEz1j&rvze;);%VGdY%ormMIS5IDS)CZ0B5|;P2ysx;#t@>9G5Cm#vn*<UYD7X!'
    '$(c7ajunh>mKkQr5mp`_X5lBQzKjIg77`#aHU@FAocZ0cOdm;7AW_aC-5R8l>h?=9K_=zQC*$)-26D60II~i}wiN1L2V%}-EG;pH'
    '&e4F_HOS3Lk9?#EDGX_hShR=vwPwIus(>UuK`@P2tB3e(i9KqlRl}R7!dU#Q)SRexy95ixzJyu@HQtjGjj<68o>Gg5OWb4H{#&0('
    'Xvu{_5hs{gtjR`xs(hTj3ifuHWP<4g_kdIt2&SZF7o1=C#4x6>#9qR`mx`FD)Td+nRg+Z6Wr>0rsa3MKF(+9t8;etDpQ3d2xU<!8'
    'Zp|7O(^BEHnzPEJNc?L=Ow}>?ANmSFJSxZ|@eAp5v$}GtB!Z<0zj~DFrQ_<rD&}hhQ;A**<v`0>jY^!w4}T&5&MV~!be#Vb`m{`k'
    'Uy}lLT*9~*(EZK1Fsj0u)xxI&`O0v96L`IOrKri2jny+VJ%~$ao*3%YMA|c{@OXJ2DJAi&rk<$JDW&&`0%a=IIL#Wa$E$>29oDSi'
    'KFI`VB23Eb&7J~}IY}_;H;2Z{nE{d}YS)q?;!n?Q=6-anKa@|_H$g(zBtl1zuY`z|lQMe6k*oyds|EAYu`lE&1v#lAR{6BX9W*X3'
    '`kx`(({!yN<eOS)3TGzpaVV}nu{Jdve*?=))$D~`ZOtu4o2#zI>vv9e+wBwWk$8=N${xEd{{h$vwv+'
)
# fmt: on
